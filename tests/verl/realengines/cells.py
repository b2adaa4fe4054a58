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

    VeOmni's engine takes no world size of 1. Both owners at once matter there only: the FSDP engine turns verl's own
    offload off when it is given the policy, which two cells show.
    """
    plan: list[tuple[str, int, str, str, tuple[str, ...]]] = [
        ("fsdp", 1, "policy", RL_GROUPS, OPERATIONS),
        ("fsdp", 2, "policy", RL_GROUPS, OPERATIONS),
        ("fsdp", 2, "manual", RL_GROUPS, OPERATIONS),
        ("fsdp", 2, "both", RL_GROUPS, ("train", "save")),
        ("fsdp", 2, "policy", SFT_GROUPS, ("train", "save", "export")),
        ("veomni", 2, "policy", RL_GROUPS, OPERATIONS),
        ("veomni", 2, "manual", RL_GROUPS, OPERATIONS),
        ("veomni", 2, "both", RL_GROUPS, OPERATIONS),
        ("veomni", 2, "policy", SFT_GROUPS, ("train", "save", "export")),
    ]
    return [
        Cell(release, engine, offload, operation, ranks, groups)
        for engine, ranks, offload, groups, operations in plan
        for operation in operations
    ]
