"""What a row was before: the little that rules must know of it beyond the facts of the moment.

A live look knows no past: every row is as if it had come at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diagkit.diagnosis.layout import registered_late
from diagkit.trace import RankTrace
from diagkit.trace.schema import (
    ABSENT,
    BUFFER,
    OPTIMIZER_STATE,
    Moment,
    Residency,
    device_type,
)


@dataclass(frozen=True, slots=True)
class Past:
    """One row's past, as far as the trace tells it."""

    rested: str | None = None  # of a buffer: where its bytes were when it first came to rest, as a device type
    born: str = ""  # of an optimizer state that is as it was from the first: the observed call in which it appeared
    tied: bool = False  # of a parameter: its slot once held the tensor of an earlier one
    emptied: bool = False  # of a buffer: `to_empty` gave it bytes
    late: bool = False  # of a parameter: registered after its model had been wrapped


#: Nothing is known of it, or nothing that matters.
NOTHING = Past()
#: Pasts of which at least one answers as any other does that could be.
PASTS = (
    NOTHING,
    Past(tied=True),
    Past(late=True),
    Past(born="Optimizer.step"),
    Past(emptied=True),
    *(Past(rested=device) for device in ("cpu", "any accelerator")),
)


class Pasts:
    """The pasts of a rank's rows, while its moments are replayed."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._known = {row: Past(late=True) for row in registered_late(trace.rows)}
        self._parameters = bool(self._known)
        self._buffers = [row.id for row in trace.rows if row.kind == BUFFER]

    def of(self, row: int) -> Past:
        """The row's past by now."""
        return self._known.get(row, NOTHING)

    @property
    def of_parameters(self) -> bool:
        """Whether any parameter has a past, so that equal facts need not mean equal answers."""
        return self._parameters

    def note(self, moment: Moment, before: list[int]) -> None:
        """Takes a moment in; ``before`` are the numbers of the facts that rows had until then."""
        called = _call(moment)
        rows = self._trace.rows
        for change in moment.changes:
            facts = self._trace.facts[change.facts]
            inside = range(change.start, change.start + change.count)
            if isinstance(facts, Residency) and facts.shares == "tie":
                for row in inside:
                    self._known[row] = replace(self.of(row), tied=True)
                self._parameters = True
            elif OPTIMIZER_STATE in (rows[inside[0]].kind, rows[inside[-1]].kind):
                for row in inside:
                    if rows[row].kind == OPTIMIZER_STATE and before[row] != change.facts:
                        self._known[row] = Past(born=called if before[row] == ABSENT else "")
            elif moment.cause is not None and "Module.to_empty" in moment.cause.chain:
                for row in inside:
                    if rows[row].kind == BUFFER:
                        self._known[row] = replace(self.of(row), emptied=True)

    def rest(self, now: list[int]) -> None:
        """The state is at rest: buffers that were not before are where they were put."""
        for row in self._buffers:
            facts = self._trace.facts[now[row]]
            if isinstance(facts, Residency) and self.of(row).rested is None and facts.metadata_device != "meta":
                self._known[row] = replace(self.of(row), rested=device_type(facts.storage_device) or "")


def _call(moment: Moment) -> str:
    """The observed call that a moment tells of. An optimizer's step that raises is seen in the exception alone."""
    if moment.cause is None:
        return ""
    stepped = moment.failure is not None and any(name.endswith(".step") for name in moment.cause.chain)
    return "Optimizer.step" if stepped else moment.cause.operation
