"""What one rank left behind, as far as it could be read.

`RankTrace.findings` and `RankTrace.frame` are the doors that a whole run has, too; they import at call, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagkit.trace.schema import ABSENT, OPTIMIZER, OPTIMIZER_STATE, PARAMETER, Cause, Facts, Header, Moment, Phase, Row
from diagkit.trace.shapes import LocalShapes

if TYPE_CHECKING:
    import pandas

PROBLEM_LIMIT = 50


@dataclass(frozen=True, slots=True)
class Transition:
    """Some rows went from one residency to another at a moment, all alike."""

    moment: Moment
    rows: tuple[Row, ...]
    before: Facts | None
    after: Facts | None
    exchanged: bool

    @property
    def cause(self) -> Cause | None:
        return self.moment.cause


@dataclass(slots=True)
class State:
    """Right after a moment: of each row the number of its facts (`ABSENT`: not there) and its storage generation."""

    facts: list[int]
    generations: list[int]


class RankTrace:
    """What one rank left behind.

    ``rows``, ``facts`` (number -> record, None for 0), ``moments``, ``phases`` (ordinal -> phase, 0 is "outside any
    phase"), ``local_shapes`` (row id -> shape on this rank), ``troubles`` (faults the recorder told of),
    ``problems`` (what could not be read), ``ended`` (the reason of the closing line, None for a trace that was cut
    off), ``standstill`` (where and for how long it stood still last, None where it went on afterwards).
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.header = Header()
        self.headless = False  # its header could not be read: rank from the file's name, nothing else known
        self.rows: list[Row] = []
        self.local_shapes = LocalShapes()
        self.facts: list[Facts | None] = [None]
        self.causes: dict[int, Cause] = {}
        self.moments: list[Moment] = []
        self.phases: dict[int, Phase] = {0: Phase(0, "")}
        self.troubles: list[str] = []
        self.problems: list[str] = []
        self.ended: str | None = None
        self.standstill: str | None = None
        self._facts_of: dict[int, int] = {}  # number in the file -> index in `facts`
        self._last: tuple[int, State] | None = None

    def __repr__(self) -> str:
        header = self.header
        device = f"{'simulated ' if header.simulated else ''}{header.device}"
        failures = len(self.failures)
        counts = f"{len(self.rows)} rows, {len(self.moments)} moments, {failures} failure{'s' * (failures != 1)}"
        end = "" if self.ended else ", cut off"
        return f"<RankTrace {header.run or '?'}: rank {header.rank} of {header.world_size}, {device}, {counts}{end}>"

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def failures(self) -> list[Moment]:
        """Moments at which an exception was seen, in order."""
        return [moment for moment in self.moments if moment.failure is not None]

    @property
    def last_phase(self) -> Phase:
        """The innermost phase that was open when the trace ended; ordinal 0 where none was."""
        phase = self.phases[self.moments[-1].phase] if self.moments else self.phases[0]
        while phase.ordinal and phase.exit is not None:
            parent = self.phases.get(phase.parent, self.phases[0])
            phase = parent if parent.ordinal < phase.ordinal else self.phases[0]
        return phase

    @property
    def living(self) -> int:
        """Index of the last moment at which what is watched still lived; -1 where there is no moment.

        Optimizers and models that only died after it, outside any phase and by no call, went with the job's own end,
        which says nothing of how they were.
        """
        last = len(self.moments) - 1
        at = last
        while at > 0 and self._only_dies(self.moments[at]):
            at -= 1
        gone = {self.rows[change.start].kind for moment in self.moments[at + 1 :] for change in moment.changes}
        return at if gone.intersection((PARAMETER, OPTIMIZER_STATE, OPTIMIZER)) else last

    @staticmethod
    def _only_dies(moment: Moment) -> bool:
        if moment.phase or moment.failure or moment.cause or moment.key:
            return False
        return all(change.facts == ABSENT for change in moment.changes)

    def state(self, moment: int | Moment) -> State:
        """The state right after a moment. Reading forward is cheap; going back replays from the beginning."""
        index = range(len(self.moments))[moment if isinstance(moment, int) else moment.index]
        start, state = -1, State([], [])
        if self._last is not None and self._last[0] <= index:
            start, last = self._last
            state = State(last.facts.copy(), last.generations.copy())
        for at in range(start + 1, index + 1):
            self._replay(self.moments[at], state)
        missing = len(self.rows) - len(state.facts)
        state.facts.extend([ABSENT] * missing)
        state.generations.extend([0] * (len(self.rows) - len(state.generations)))
        self._last = (index, State(state.facts.copy(), state.generations.copy()))
        return state

    def _replay(self, moment: Moment, state: State) -> None:
        if moment.key:
            state.facts = [ABSENT] * len(state.facts)
        for change in moment.changes:
            end = change.start + change.count
            if end > len(state.facts):
                state.facts.extend([ABSENT] * (end - len(state.facts)))
            state.facts[change.start : end] = [change.facts] * change.count
            if end > len(state.generations):
                state.generations.extend([0] * (end - len(state.generations)))
            if change.exchanged:
                for row in range(change.start, end):
                    state.generations[row] += 1

    def transitions(self) -> Iterator[Transition]:
        """Every change of a row that existed before and after, in order; the rows that changed alike together."""
        facts: list[int] = [ABSENT] * len(self.rows)
        for moment in self.moments:
            groups: dict[tuple[int, int, bool], list[Row]] = {}
            touched: set[int] = set()
            for change in moment.changes:
                for row in range(change.start, change.start + change.count):
                    before, facts[row] = facts[row], change.facts
                    touched.add(row)
                    if (before != change.facts or change.exchanged) and before != ABSENT and change.facts != ABSENT:
                        groups.setdefault((before, change.facts, change.exchanged), []).append(self.rows[row])
            if moment.key:
                for row in range(len(facts)):
                    if row not in touched:
                        facts[row] = ABSENT
            for (old, new, exchanged), rows in groups.items():
                yield Transition(moment, tuple(rows), self.facts[old], self.facts[new], exchanged)

    def row(self, name: str, kind: str = "parameter", part: str = "", model: str | None = None) -> Row:
        """The row of that name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name and row.kind == kind and (not part or row.part == part) and model in (None, row.model):
                return row
        raise KeyError(f"no {kind} named {name!r} in the trace of rank {self.rank}")

    def findings(self) -> Any:
        """What `diagkit.diagnosis` finds on this rank alone."""
        from diagkit.diagnosis import diagnose

        return diagnose(self)

    def frame(self, every: bool = False) -> pandas.DataFrame:
        """This rank's part of `Trace.frame`."""
        from diagkit.trace.merged import Trace

        return Trace({self.rank: self}, self.path).frame(every)

    def _problem(self, text: str) -> None:
        if len(self.problems) < PROBLEM_LIMIT:
            self.problems.append(text)
        elif len(self.problems) == PROBLEM_LIMIT:
            self.problems.append("further problems are not listed")
