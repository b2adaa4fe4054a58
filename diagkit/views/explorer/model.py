"""What the explorer shows, as plain state: a choice goes in, what is to be seen comes out. No widget, no HTML.

The rules: a line stands for tensors of one pattern that lived alike through the chosen phase, so that lines stay where
they are while the moment changes; all that can be chosen is checked here; what was worked out once for a rank, a phase
and a filter is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from diagkit.diagnosis import Finding, Findings, diagnose
from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import BUFFER, PARAMETER, TENSOR_KINDS, Moment, Row
from diagkit.views.chosen import one_rank
from diagkit.views.divergence import Place, counterpart
from diagkit.views.explorer.folding import Line, Ways, fold
from diagkit.views.scene import clean
from diagkit.views.story import Cell, Column, Tensor, named
from diagkit.views.words import moment_name

__all__ = ["Choice", "Exploration", "Shown", "moment_text"]

Key = TypeVar("Key")
Value = TypeVar("Value")

#: Ranks and choices whose lines are kept; a reader goes back and forth between few.
KEPT = 32


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen: a run (0 or 1), a rank, a phase's ordinal (None: all), a moment's index in that run, a filter
    (a text or a shell pattern), the number of a finding, a tensor's name.
    """

    run: int = 0
    rank: int = 0
    phase: int | None = None
    moment: int = 0
    pattern: str = ""
    finding: int | None = None
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """One view. ``moments[r]`` is the moment of run ``r``, None where it never got there; ``cells[i][r]`` belongs to
    ``lines[i]``; ``changed`` are the lines that changed at this moment, ``apart`` those in which the runs differ.
    """

    heads: tuple[str, ...]
    moments: tuple[Moment | None, ...]
    lines: tuple[Line, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    changed: frozenset[int]
    apart: frozenset[int]
    left_out: int  # tensors whose lines are not shown


class Exploration:
    """One run, or two with the same questions asked of both."""

    def __init__(self, traces: Sequence[Trace], names: Sequence[str]) -> None:
        self.traces = tuple(traces)
        self.names = tuple(names)
        self._findings: dict[int, Findings] = {}
        self._ways: dict[int, Ways] = {}  # by the identity of a rank's trace, which lives as long as this
        self._lines: dict[tuple[object, ...], tuple[list[Line], int]] = {}

    # ---- what can be chosen

    def start(self) -> Choice:
        """Where a reader begins: at the first failure, else at the first finding, else at the end."""
        trace = self.traces[0]
        if trace.first_failure is not None:
            rank = one_rank(trace, None)
            return Choice(rank=rank.rank, moment=rank.failures[0].index)
        if self.findings(0):
            return replace(self.jump(Choice(), 0), finding=None)
        first = next(iter(trace))
        return Choice(rank=first.rank, moment=max(len(first.moments) - 1, 0))

    def mended(self, choice: Choice) -> Choice:
        """The nearest choice that can be shown."""
        run = choice.run if 0 <= choice.run < len(self.traces) else 0
        trace = self.traces[run]
        rank = choice.rank if choice.rank in trace.ranks else next(iter(trace.ranks))
        phase = choice.phase if choice.phase in trace[rank].phases and choice.phase else None
        indices = [m.index for m in self.moments(replace(choice, run=run, rank=rank, phase=phase))]
        moment = min(indices, key=lambda index: abs(index - choice.moment), default=0)
        finding = choice.finding
        if finding is not None and not 0 <= finding < len(self.findings(run)):
            finding = None
        return replace(choice, run=run, rank=rank, phase=phase, moment=moment, finding=finding)

    def phases(self, choice: Choice) -> list[tuple[str, int | None]]:
        """Names and ordinals of the phases of the chosen rank."""
        phases = [p for p in self._rank(choice).phases.values() if p.ordinal]
        return [("all phases", None), *((f"{p.ordinal} {clean(p.name)}", p.ordinal) for p in phases)]

    def moments(self, choice: Choice) -> list[Moment]:
        """The moments among which the slider moves: those of the chosen phase and of the phases inside it."""
        rank = self._rank(choice)
        if choice.phase is None:
            return rank.moments
        wanted = {choice.phase}
        for ordinal, phase in rank.phases.items():  # parents come first
            if phase.parent in wanted:
                wanted.add(ordinal)
        return [m for m in rank.moments if m.phase in wanted]

    def findings(self, run: int) -> Findings:
        """What is wrong in a run; judged once."""
        if run not in self._findings:
            self._findings[run] = diagnose(self.traces[run])
        return self._findings[run]

    def jump(self, choice: Choice, finding: int) -> Choice:
        """To the moment, the rank and the tensors of a finding."""
        found = self.findings(choice.run)[finding]
        rank = found.ranks[0] if found.ranks else choice.rank
        here = replace(choice, rank=rank, moment=found.moment, finding=finding, phase=None, pattern="", tensor="")
        first = next(iter(_tensor_names(found)), "")
        known = any(row.name == first and row.kind in (PARAMETER, BUFFER) for row in self._rank(here).rows)
        return self.mended(replace(here, tensor=first if known else ""))

    # ---- what is shown

    def shown(self, choice: Choice) -> Shown:
        """What to see at a choice; `mended` choices only."""
        order = [choice.run, *(r for r in range(len(self.traces)) if r != choice.run)]
        lines, left_out = self._lines_of(choice, order)
        at = self._moments_at(choice, order)
        cells = tuple(
            tuple(way[m.index] if way and m is not None else None for way, m in zip(line.ways, at, strict=True))
            for line in lines
        )
        index = choice.moment
        changed = frozenset(
            i for i, line in enumerate(lines) if index and (way := line.ways[0]) and way[index] != way[index - 1]
        )
        apart = frozenset(i for i, both in enumerate(cells) if len(both) > 1 and _typed(both[0]) != _typed(both[1]))
        heads = tuple(self._head(r, m, choice.rank) for r, m in zip(order, at, strict=True))
        return Shown(heads, tuple(at), tuple(lines), cells, changed, apart, left_out)

    def _head(self, run: int, moment: Moment | None, rank: int) -> str:
        there = self.traces[run].ranks.get(rank)
        told = moment_text(there, moment) if there and moment else "never got there"
        where = f"rank {rank}, " if len(self.traces[run]) > 1 else ""
        return f"{self.names[run]} · {where}{told}"

    def _rank(self, choice: Choice) -> RankTrace:
        return self.traces[choice.run][choice.rank]

    def _moments_at(self, choice: Choice, order: Sequence[int]) -> list[Moment | None]:
        rank = self._rank(choice)
        if not rank.moments:
            return [None] * len(order)
        here = rank.moments[choice.moment]
        place = Place.of(rank, here)
        others = [self.traces[r].ranks.get(choice.rank) for r in order[1:]]
        return [here, *(counterpart(other, place) if other else None for other in others)]

    def _lines_of(self, choice: Choice, order: Sequence[int]) -> tuple[list[Line], int]:
        key = (choice.run, choice.rank, choice.phase, choice.pattern, choice.finding)
        ranks = [self.traces[r].ranks.get(choice.rank) for r in order]

        def folded() -> tuple[list[Line], int]:
            spans = [self._span(choice, rank) for rank in ranks]
            ways = [_kept(self._ways, id(rank), partial(Ways, rank)) if rank else None for rank in ranks]
            return fold(ways, spans, self._wanted(choice))

        return _kept(self._lines, key, folded)

    def _span(self, choice: Choice, rank: RankTrace | None) -> range:
        if rank is None or choice.phase is None:
            return range(len(rank.moments) if rank else 0)
        inside = [m.index for m in self.moments(choice)] if rank is self._rank(choice) else []
        return range(inside[0], inside[-1] + 1) if inside else range(len(rank.moments))

    def _wanted(self, choice: Choice) -> list[Tensor]:
        """The chosen tensors, in the model's order."""
        rows: Iterable[Row] = self._rank(choice).rows
        concerned: list[Row] = []
        if choice.finding is not None:
            labels = set(self.findings(choice.run)[choice.finding].names)
            concerned = [row for row in rows if row.kind in TENSOR_KINDS and row.label in labels]
        # A finding on a group or an engine has no tensors of its own.
        rows = concerned or (row for row in rows if row.kind in (PARAMETER, BUFFER))
        pattern = choice.pattern.strip()
        return [(row.kind, row.model, row.name, row.part) for row in rows if not pattern or named(row.name, pattern)]


def _kept(cache: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """What was made for this key; of what was made, only the latest is kept."""
    if key not in cache:
        if len(cache) >= KEPT:
            del cache[next(iter(cache))]
        cache[key] = make()
    return cache[key]


def moment_text(rank: RankTrace, moment: Moment) -> str:
    """``"12 save: Module.to"``."""
    phase = rank.phases.get(moment.phase, rank.phases[0])
    return f"{moment.index} {moment_name(Column(moment, phase, False, 0, 0))}"


def _tensor_names(finding: Finding) -> Iterable[str]:
    return (name.partition(" [")[0] for name in finding.names)


def _typed(cell: Cell | None) -> object:
    """A cell with the index of its devices set aside: two runs may have used different ones."""
    if cell is None:
        return None
    storage = cell.storage and cell.storage.partition(":")[0]
    return replace(cell, metadata=cell.metadata.partition(":")[0], storage=storage)
