"""What a cell's trace says: where everything was, what moved the whole model, which call split it, what failed first.

Rules of this module: it reads recorded facts only, so it also tells of a cell that was killed; no torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diagkit.trace import RankTrace
from diagkit.trace.schema import BUFFER, CALL, FAILURE, PARAMETER, Moment, Residency

__all__ = ["Evidence", "Residencies", "evidence", "summary"]

Residencies = Mapping[tuple[str, str], Residency]
"""Kind (``parameter`` or ``buffer``) and name -> residency, at one moment."""


@dataclass(frozen=True)
class Evidence:
    """One rank's account of one phase; a moment that never came is None."""

    rest: Residencies
    """When the phase began."""
    after_move: Residencies | None
    """After its first move of the whole model."""
    failure: Residencies | None
    """When its first exception passed."""
    end: Residencies | None
    moves: tuple[str, ...]
    """Whole-model moves in order, by the method called: ``Module.to``, ``Module.cpu``."""
    first_cause: str | None
    """The call that first drove a parameter's metadata and bytes apart, from the operation to torch's internals."""
    splits_while: frozenset[str]
    """Names of the phases in which a split was seen at some moment (``init`` among them is the field's usual case)."""
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The part of a cell's JSON record that comes from the trace."""
        moments = {"rest": self.rest, "after_move": self.after_move, "failure": self.failure, "end": self.end}
        return {
            "first_cause": self.first_cause,
            "moves": list(self.moves),
            "splits_while": sorted(self.splits_while),
            "residency": {name: None if at is None else summary(at) for name, at in moments.items()},
        }


def summary(residencies: Residencies) -> dict[str, dict[str, int]]:
    """How many are where: ``{"parameters": {"cpu/cpu pinned": 21}, "buffers": {"npu:0/npu:0": 1}}``."""
    counts = {
        kind: Counter(facts.short() for (of, _), facts in residencies.items() if of == kind)
        for kind in (PARAMETER, BUFFER)
    }
    return {f"{kind}s": dict(counter) for kind, counter in counts.items()}


def evidence(trace: RankTrace, phase: str) -> Evidence:
    """Read one rank's trace for the first phase of that name."""
    ordinal = next((number for number, p in trace.phases.items() if p.name == phase), -1)
    inside = [moment for moment in trace.moments if moment.phase == ordinal]
    moves = [moment for moment in inside if _moves_everything(trace, moment)]
    failures = [moment for moment in inside if moment.failure is not None]
    splitting = next((moment for moment in inside if moment.kind == CALL and _any_split(trace, moment)), None)
    ended = trace.phases[ordinal].exit if ordinal >= 0 else None
    return Evidence(
        rest=_residencies(trace, inside[0]) if inside else {},
        after_move=_residencies(trace, moves[0]) if moves else None,
        failure=_residencies(trace, failures[0]) if failures else None,
        end=None if ended is None else _residencies(trace, trace.moments[ended]),
        moves=tuple(moment.label for moment in moves),
        first_cause=" -> ".join(splitting.cause.chain) if splitting is not None and splitting.cause else None,
        splits_while=frozenset(
            trace.phases[moment.phase].name for moment in trace.moments if moment.phase and _any_split(trace, moment)
        ),
        problems=tuple(trace.problems + trace.troubles),
    )


def _moves_everything(trace: RankTrace, moment: Moment) -> bool:
    cause = moment.cause
    if moment.kind not in (CALL, FAILURE) or cause is None or cause.operation != "Module._apply":
        return False
    # A part is named by its path, which starts the names of what it holds; the whole model by its class.
    return not any(row.name.startswith(f"{cause.target}.") for row in trace.rows)


def _residencies(trace: RankTrace, moment: Moment) -> Residencies:
    state = trace.state(moment)
    found: dict[tuple[str, str], Residency] = {}
    for row in trace.rows:
        facts = trace.facts[state.facts[row.id]]
        if row.kind in (PARAMETER, BUFFER) and isinstance(facts, Residency):
            found[row.kind, row.name] = facts
    return found


def _any_split(trace: RankTrace, moment: Moment) -> bool:
    numbers = set(trace.state(moment).facts)
    return any(isinstance(facts := trace.facts[number], Residency) and facts.split for number in numbers)
