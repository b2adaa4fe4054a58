"""The cells: which engine, of which release, does which operation first after its initialisation, on how many ranks.

One cell is one operation on a fresh engine in fresh processes, because a failure leaves an engine poisoned.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

RL_GROUPS = "cpu:gloo,npu:hccl"
"""The process groups of verl's reinforcement-learning workers."""

SFT_GROUPS = "hccl"
"""The process groups of verl's fine-tuning trainer: no backend for tensors on the CPU."""

OFFLOADS: dict[str, dict[str, bool]] = {
    "policy": {"offload_policy": True},
    "manual": {"param_offload": True, "optimizer_offload": True},
    "both": {"offload_policy": True, "param_offload": True, "optimizer_offload": True},
}
"""``policy``: FSDP2 moves parameters by CPUOffloadPolicy; ``manual``: verl moves them itself, the control; ``both``: two owners."""

OPERATIONS = ("init", "train", "save", "load", "export", "to")


@dataclass(frozen=True)
class Cell:
    """One experiment; ``checkpoint`` is the one operation that is preparation: a real checkpoint for the load cells."""

    release: str
    engine: str
    offload: str
    operation: str
    ranks: int = 1
    groups: str = RL_GROUPS

    @property
    def name(self) -> str:
        """A name that is also a folder's."""
        groups = "rl" if self.groups == RL_GROUPS else "sft"
        return f"verl-{self.release}-{self.engine}-{self.offload}-{self.operation}-{self.ranks}x-{groups}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def cells_of(release: str) -> list[Cell]:
    """List every cell of one release, those that write a checkpoint before those that load it."""
    cells = [
        Cell(release, "fsdp", offload, operation, ranks)
        for ranks in (1, 2)
        for offload in ("policy", "manual")
        for operation in ("init", "checkpoint", "train", "save", "load", "export", "to")
    ]
    cells += [Cell(release, "fsdp", "policy", operation, 2, SFT_GROUPS) for operation in ("train", "save", "export")]
    cells += [
        Cell(release, "veomni", offload, operation, 2)
        for offload in ("policy", "manual", "both")
        for operation in ("init", "checkpoint", "train", "save", "load", "export", "to")
    ]
    cells += [Cell(release, "veomni", "policy", operation, 2, SFT_GROUPS) for operation in ("save", "export")]
    return cells
