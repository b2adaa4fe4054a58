"""What the demo runs: one experiment is one operation on a fresh engine, and the matrix is a list of them.

Rules of this module: data and names only; nothing here imports torch, so that the command line can check what it was
asked for before it loads anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ENGINES",
    "FLAGS",
    "OPERATIONS",
    "REVISIONS",
    "Experiment",
    "checkpoint_folder",
    "checkpoint_kind",
    "group_names",
    "matrix",
    "story",
]

# The names of `diagkit.lab.engines`, repeated because importing that package loads torch; a test holds them together.
ENGINES: tuple[str, ...] = ("fsdp", "veomni")
REVISIONS: tuple[str, ...] = ("before", "#6463", "#6604", "#7005", "#7103", "current")

OPERATIONS: dict[str, str] = {
    "save": "engine.save_checkpoint(folder)",
    "load": "engine.load_checkpoint(folder), of a checkpoint that a trained engine wrote",
    "export": "every tensor of engine.get_per_tensor_param()",
    "train": "with engine.train_mode(): engine.train_batch()",
    "move": "engine.to(device, model=True), which no revision guards, then module.state_dict()",
}
"""The operations and what each does on an engine that has done nothing before."""

FLAGS: dict[str, str] = {
    "policy": "CPUOffloadPolicy, no manual offload (the defaults)",
    "both": "CPUOffloadPolicy and param_offload and optimizer_offload: two owners of one thing",
    "manual": "no policy; param_offload and optimizer_offload (the control)",
    "lora": "CPUOffloadPolicy, and a LoRA adapter in the model (what #7005 asks about)",
}
"""Which offload flags the engine is built with."""

_COLLECTIVES = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Experiment:
    """One cell: ``operation`` on a fresh ``engine`` at ``revision``, with these flags, in such a process group.

    ``group`` is a backend string of ``torch.distributed``. ``without`` names guards that are taken out of the revision.
    """

    engine: str
    revision: str
    operation: str
    flags: str = "policy"
    group: str = "cpu:gloo,npu:hccl"
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for people: ``fsdp before save, cpu:gloo,npu:hccl``."""
        missing = f" without {', '.join(self.without)}" if self.without else ""
        flags = "" if self.flags == "policy" else f" ({self.flags})"
        return f"{self.engine} {self.revision}{missing} {self.operation}{flags}, {self.group}"

    @property
    def slug(self) -> str:
        """The same as a folder name."""
        words = (self.engine, self.revision, *(f"no-{w}" for w in self.without), self.operation, self.flags, self.group)
        return "_".join(words).replace("#", "").replace(":", "-").replace(",", "+")


def checkpoint_kind(flags: str) -> str:
    """The flags of the engine that writes the checkpoint for a load with these flags: both owners read the policy's."""
    return "policy" if flags == "both" else flags


def checkpoint_folder(out: Path, cell: Experiment) -> Path:
    """Where the checkpoint is that a load cell reads."""
    return out / "checkpoints" / f"{cell.engine}_{checkpoint_kind(cell.flags)}"


def group_names(device: str) -> tuple[str, str]:
    """The two kinds of process group on real nodes: what RL workers use, and what the SFT trainer uses.

    >>> group_names("npu")
    ('cpu:gloo,npu:hccl', 'hccl')
    """
    collectives = _COLLECTIVES[device]
    return f"cpu:gloo,{device}:{collectives}", collectives


_DEFAULT_CELLS: tuple[tuple[str, str], ...] = (
    ("save", "policy"),
    ("load", "policy"),
    ("load", "both"),
    ("export", "policy"),
    ("train", "policy"),
    ("train", "both"),
)
_CONTROL_CELLS: tuple[tuple[str, str], ...] = (
    ("save", "manual"),
    ("load", "manual"),
    ("export", "manual"),
    ("move", "policy"),
)


def matrix(
    engines: Sequence[str] = ENGINES,
    revisions: Sequence[str] = ("before", "current"),
    groups: Sequence[str] = ("cpu:gloo,npu:hccl", "hccl"),
    control: bool = False,
    operations: Sequence[str] = tuple(OPERATIONS),
) -> list[Experiment]:
    """Every cell of the table, groups outermost: unguarded (``before``) and guarded (``current``) by default.

    ``control`` adds, in the first process group, the engines without the policy, which must work at every revision, and
    the ``to()`` that none guards.
    """
    return [
        Experiment(engine, revision, operation, flags, group)
        for number, group in enumerate(groups)
        for engine in engines
        for revision in revisions
        for operation, flags in (_DEFAULT_CELLS + _CONTROL_CELLS if control and number == 0 else _DEFAULT_CELLS)
        if operation in operations
    ]


def story(group: str = "cpu:gloo,npu:hccl") -> list[Experiment]:
    """The bug report in two cells: the FSDP engine's save as reported (verl #5995), and as mended (#6604)."""
    return [Experiment("fsdp", "before", "save", group=group), Experiment("fsdp", "#6604", "save", group=group)]
