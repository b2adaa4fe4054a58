"""The cells: which engine, of which release, does which operation first after its initialisation, on how many ranks.

One cell is one operation on a fresh engine in fresh processes, because a failure leaves an engine poisoned. For each
cell with a real engine there is one with the lab's engine, at the revision that the release stands for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

RELEASES: dict[str, str] = {"0.8.0": "#6463", "0.9.1": "current"}
"""verl's releases and the lab's revision that each is compared with.

0.8.0 has the first part of the fix only, the FSDP engine's export; 0.9.1 has all of it, with VeOmni's staged export.
"""

RL_GROUPS = "cpu:gloo,npu:hccl"
"""The process groups of verl's reinforcement-learning workers."""

SFT_GROUPS = "hccl"
"""The process groups of verl's fine-tuning trainer: no backend for tensors on the CPU."""

OFFLOADS: dict[str, dict[str, bool]] = {
    "policy": {"offload_policy": True},
    "manual": {"param_offload": True, "optimizer_offload": True},
    "both": {"offload_policy": True, "param_offload": True, "optimizer_offload": True},
}
"""``policy``: FSDP2 moves parameters, by CPUOffloadPolicy; ``manual``: verl does, the control; ``both``: two owners."""

OPERATIONS = ("init", "checkpoint", "train", "save", "load", "export", "to")
"""``checkpoint`` is preparation: it writes what ``load`` reads."""


@dataclass(frozen=True)
class Cell:
    """One experiment. ``release`` is verl's, or the lab's revision."""

    release: str
    engine: str
    offload: str
    operation: str
    ranks: int = 1
    groups: str = RL_GROUPS

    @property
    def is_real(self) -> bool:
        """Whether verl's own engine is meant."""
        return self.release in RELEASES

    @property
    def name(self) -> str:
        """A name that is also a folder's."""
        origin = "verl" if self.is_real else "lab"
        groups = "rl" if self.groups == RL_GROUPS else "sft"
        release = self.release.removeprefix("#")
        return f"{origin}-{release}-{self.engine}-{self.offload}-{self.operation}-{self.ranks}x-{groups}"

    @property
    def counterpart(self) -> Cell:
        """The same experiment with the lab's engine."""
        return replace(self, release=RELEASES[self.release])

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def cells_of(release: str) -> list[Cell]:
    """List every cell of one release, those that write a checkpoint before those that load it.

    VeOmni's engine takes no world size of 1, and only there can both owners be on at once: the FSDP engine turns
    verl's own offload off when it is given the policy.
    """
    cells = [
        Cell(release, engine, offload, operation, ranks)
        for engine, offloads, worlds in (
            ("fsdp", ("policy", "manual", "both"), (1, 2)),
            ("veomni", ("policy", "manual", "both"), (2,)),
        )
        for ranks in worlds
        for offload in offloads
        for operation in OPERATIONS
        if not (offload == "both" and ranks == 1)
    ]
    for engine in ("fsdp", "veomni"):
        cells += [
            Cell(release, engine, "policy", operation, 2, SFT_GROUPS) for operation in ("train", "save", "export")
        ]
    return cells
