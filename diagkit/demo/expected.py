"""What each cell must do, kept as data: the field's measured outcomes, row by row, and for which torch they hold.

Rules of this module: no outcome here is computed from the lab's code. The rows were measured on verl's own engines
(eight revisions) and veomni 0.1.11 with torch 2.13; the demo compares its cells with them and fails on a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagkit.demo.experiments import REVISIONS, Experiment
from diagkit.diagnosis.predictions.facets import asks_backend

__all__ = ["FAILURES", "Expectation", "expected"]

FAILURES: dict[str, str] = {
    "split": "Attempted to set the storage of a tensor",
    "no-cpu-backend": "No backend type associated with device type cpu",
    "not-on-cpu": "should be materialized on CPU",
    "poisoned": "'FSDPParam' object has no attribute 'param_dtype'",
}
"""The texts by which the four failures of this table are known, by short names."""

ANY = "*"


@dataclass(frozen=True)
class Expectation:
    """One row: which cells it speaks of, and what they do.

    ``failure`` is a key of :data:`FAILURES`, or None for success; ``torch`` the first version (major, minor) on
    which the failure shows (older ones pass over it in silence).
    ``exported`` is where exported tensors are: ``device`` or ``cpu``. ``moves`` lists the whole-model moves in order,
    by the method of `torch.nn.Module` (``"to cpu"``); a ``cpu`` of what is on the CPU already counts too.
    """

    engine: str
    since: str
    until: str
    operation: str
    flags: str
    group: str  # "mixed" (with a CPU backend), "alone", or ANY
    failure: str | None
    retry: str | None = None
    exported: str | None = None
    moves: str = ""
    torch: tuple[int, int] = (0, 0)

    def shows(self, torch: tuple[int, ...], ranks: int) -> bool:
        """Whether the failure shows on this torch, with so many ranks."""
        asked = self.failure != "no-cpu-backend" or asks_backend(ranks, torch)
        return self.failure is not None and torch >= self.torch and asked

    def speaks_of(self, cell: Experiment) -> bool:
        """Whether this row is about the cell."""
        age = REVISIONS.index(cell.revision)
        kind = "mixed" if "," in cell.group else "alone"
        return (
            self.engine in (ANY, cell.engine)
            and REVISIONS.index(self.since) <= age <= REVISIONS.index(self.until)
            and self.operation == cell.operation
            and cell.flags in self.flags.split("|")
            and self.group in (ANY, kind)
        )


def _row(engine: str, since: str, until: str, operation: str, flags: str, group: str, failure: str | None,
         **more: object) -> Expectation:  # fmt: skip
    if failure == "split":
        more.setdefault("torch", (2, 9))
    return Expectation(engine, since, until, operation, flags, group, failure, **more)  # type: ignore[arg-type]


# fmt: off
ROWS: tuple[Expectation, ...] = (
    # FSDP engine. With both flags it clears the manual ones: both is like policy. Under it LoRA does not matter.
    _row("fsdp", "before", "#6463", "save", "policy|both|lora", ANY, "split", moves="to"),
    _row("fsdp", "#6604", "current", "save", "policy|both|lora", ANY, None),
    _row("fsdp", "before", "current", "load", "policy|both|lora", ANY, None),
    _row("fsdp", "before", "before", "export", "policy|both|lora", ANY, "split", moves="to"),
    _row("fsdp", "#6463", "current", "export", "policy|both|lora", ANY, None, exported="device"),
    _row("fsdp", "before", "current", "train", "policy|both|lora", "mixed", None),
    _row("fsdp", "before", "current", "train", "policy|both|lora", "alone", "no-cpu-backend", retry="no-cpu-backend"),
    # VeOmni engine. Nothing clears its manual flags.
    _row("veomni", "before", "#7005", "save", "policy|both|lora", ANY, "split", moves="to"),
    _row("veomni", "#7103", "current", "save", "policy|lora", ANY, None),
    _row("veomni", "#7103", "current", "save", "both", ANY, None, moves="cpu"),
    _row("veomni", "before", "current", "load", "policy|lora", ANY, None),
    _row("veomni", "before", "#7005", "load", "both", ANY, None, moves="to cpu"),
    _row("veomni", "#7103", "current", "load", "both", ANY, None, moves="cpu"),
    _row("veomni", "before", "#7005", "export", "policy|both|lora", ANY, "split", moves="to"),
    _row("veomni", "#7103", "#7103", "export", "policy|lora", "mixed", None, exported="cpu"),
    _row("veomni", "#7103", "#7103", "export", "both", "mixed", None, exported="cpu", moves="cpu"),
    _row("veomni", "#7103", "#7103", "export", "policy|lora", "alone", "no-cpu-backend"),
    _row("veomni", "#7103", "#7103", "export", "both", "alone", "no-cpu-backend", moves="cpu"),
    _row("veomni", "current", "current", "export", "policy|lora", ANY, None, exported="device"),
    _row("veomni", "current", "current", "export", "both", ANY, None, exported="device", moves="cpu"),
    _row("veomni", "before", "current", "train", "policy|lora", ANY, None),
    _row("veomni", "before", "current", "train", "both", ANY, "not-on-cpu", retry="poisoned", moves="to cpu"),
    # Without the policy everything works, everywhere.
    _row(ANY, "before", "current", "save", "manual", ANY, None, moves="to cpu"),
    _row(ANY, "before", "current", "load", "manual", ANY, None, moves="to cpu"),
    _row("fsdp", "before", "#6604", "export", "manual", ANY, None, exported="device", moves="to cpu"),
    _row("fsdp", "#7005", "current", "export", "manual", ANY, None, exported="device"),
    _row("veomni", "before", "current", "export", "manual", ANY, None, exported="device", moves="to cpu"),
    _row(ANY, "before", "current", "train", "manual", ANY, None, moves="to cpu"),
    # The manual move, which no revision guards, and the first thing that looks at the result.
    _row(ANY, "before", "current", "move", "policy|both|lora", ANY, "split", moves="to"),
    _row(ANY, "before", "current", "move", "manual", ANY, None, moves="to"),
)
# fmt: on


def expected(cell: Experiment) -> Expectation:
    """The row that speaks of a cell. Exactly one does; a test holds that."""
    return next(row for row in ROWS if row.speaks_of(cell))
