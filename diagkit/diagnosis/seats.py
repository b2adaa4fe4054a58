"""On which physical device a rank computes, as far as its trace tells devices apart."""

from __future__ import annotations

from dataclasses import dataclass

from diagkit.trace import RankTrace
from diagkit.trace.schema import GroupFacts, Residency


@dataclass(frozen=True, slots=True)
class Seat:
    """One physical device of one node."""

    host: str
    device: str  # as the rank calls it: "npu:0"
    physical: str  # equal for two ranks of a node only where it is the same piece of hardware

    def same(self, other: Seat) -> bool:
        """Whether both are one device."""
        return (self.host, self.physical) == (other.host, other.physical)


def seat_of(rank: RankTrace) -> Seat | None:
    """Where the rank computes; None where it has no accelerator, more than one, or cannot be told.

    What a group or a tensor says goes before the device that was current when the recording began. An index counts
    from the first *visible* device: under Ray every rank says 0.
    """
    header = rank.header
    found = {device for facts in rank.facts for device in _devices(facts) if device.startswith(f"{header.device}:")}
    if len(found) != 1 or header.device == "cpu" or not header.host:
        return None
    (device,) = found
    index = int(device.partition(":")[2])
    if header.device_uuid and header.device_index == index:
        return Seat(header.host, device, f"{header.device} {header.device_uuid}")
    choice, _, rest = header.visible_devices.partition(";")
    visible = [part.strip() for part in choice.split(",")] if choice else []
    if index >= len(visible) > 0:
        return None
    return Seat(header.host, device, f"{header.device} {visible[index] if visible else index} {rest}".strip())


def _devices(facts: object) -> tuple[str, ...]:
    if isinstance(facts, GroupFacts):
        return (facts.device,)
    if isinstance(facts, Residency):
        return (facts.storage_device or "",)
    return ()
