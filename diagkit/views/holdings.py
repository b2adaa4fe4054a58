"""How many bytes a rank holds in each kind of memory, and what for, moment by moment.

The rules: a storage is counted once, however many names it has; the flat bytes that FSDP2 gathers are counted by
themselves where they are no longer the parameter's own; what the trace does not tell the size of is counted as tensors
without a size, never guessed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diagkit.language import msg
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import (
    BUFFER,
    EXPORT,
    GRADIENT,
    OPTIMIZER_STATE,
    PARAMETER,
    TENSOR_KINDS,
    Residency,
    Row,
    device_type,
)
from diagkit.views.sizes import local_bytes, whole_bytes
from diagkit.views.timeline import Timeline, expand

__all__ = ["PAGEABLE", "PARTS", "PINNED", "Holding", "holdings", "with_index"]

# Places and parts are keys; figures tell them in the chosen language.
PINNED, PAGEABLE = msg("cpu, pinned"), msg("cpu, pageable")
GATHERED = msg("gathered copies")
_PART = {
    PARAMETER: msg("parameters"),
    BUFFER: msg("buffers"),
    GRADIENT: msg("gradients"),
    OPTIMIZER_STATE: msg("optimizer state"),
    EXPORT: msg("exported tensors"),
}
#: What memory is held for, in the order in which it is told.
PARTS = ("parameters", "buffers", "optimizer state", "gradients", GATHERED, "exported tensors")


@dataclass(slots=True)
class Holding:
    """One moment. ``bytes_of[place, part]``: a place is a device such as ``"npu:0"``, `PINNED` or `PAGEABLE`; a part is
    one of `PARTS`. ``unsized``: tensors that hold bytes nobody can count.
    """

    bytes_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    unsized: int = 0

    def total(self, place: str) -> int:
        return sum(count for (where, _), count in self.bytes_of.items() if where == place)

    def add(self, place: str | None, part: str, size: int | None) -> None:
        if place is None or size is None:
            self.unsized += 1
        elif size:
            self.bytes_of[place, part] += size


def holdings(rank: RankTrace) -> list[Holding]:
    """What the rank held right after every moment of its trace."""
    timeline = Timeline.of_rank(rank)
    known: dict[tuple[int, int], Holding] = {}  # a stretch of rows in one state
    found = [Holding() for _ in rank.moments]
    for s, stretch in enumerate(timeline.stretches):
        if rank.rows[stretch.start].kind not in TENSOR_KINDS:
            continue
        for holding, number in zip(found, expand(timeline.steps[s], timeline.moments), strict=True):
            facts = rank.facts[number]
            if not isinstance(facts, Residency):
                continue
            if (s, number) not in known:
                known[s, number] = _held(rank, [rank.rows[i] for i in stretch], facts)
            holding.bytes_of.update(known[s, number].bytes_of)
            holding.unsized += known[s, number].unsized
    return found


def _held(rank: RankTrace, rows: list[Row], facts: Residency) -> Holding:
    """What rows in this one state hold."""
    held = Holding()
    if facts.shares is not None:
        return held  # another row's bytes, which counts them
    for row in rows:
        size = local_bytes(rank, row, facts)
        part = _PART[row.kind]
        if size != 0:
            held.add(_place(facts.storage_device, facts.pinned), part, size)
        if facts.aliased is False and facts.flat_device is not None and not facts.empty:
            held.add(_place(facts.flat_device, facts.flat_pinned), part, size)
        if facts.sharded_state == "unsharded":
            held.add(with_index(rank, facts.mesh_device or rank.header.device), GATHERED, whole_bytes(row, facts))
    return held


def _place(device: str | None, pinned: bool | None) -> str | None:
    if device_type(device) == "cpu":
        return PINNED if pinned else PAGEABLE
    return device


def with_index(rank: RankTrace, device: str) -> str:
    """The rank's own device of that type: ``"npu"`` -> ``"npu:0"``."""
    index = rank.header.device_index
    return device if index is None or device == "cpu" or ":" in device else f"{device}:{index}"
