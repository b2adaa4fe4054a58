"""Tensors folded into lines: all of one pattern of names that lived alike through some moments, on one run or on two.

The work grows with the ways of life that differ and with the tensors once, not with tensors times moments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.trace.patterns import Pattern, compress
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import PARAMETER, Residency
from diagkit.views.scene import clean
from diagkit.views.story import Cell, Tensor, cell_of
from diagkit.views.timeline import Steps, Timeline, expand

__all__ = ["Line", "Ways", "fold"]

#: Lines shown at once; the others are counted, and a filter brings them up.
LINES = 40
#: Below this number of tensors each gets a line of its own.
SINGLE = 12


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors that lived alike. ``ways[r]`` are their cells at every moment of run ``r``, None where it has none."""

    label: str
    kind: str
    names: tuple[str, ...]
    ways: tuple[tuple[Cell | None, ...] | None, ...]

    @property
    def remark(self) -> str:
        """``"×112"``, ``"buffer"``."""
        words = [] if self.kind == PARAMETER else [self.kind.replace("_", " ")]
        return " ".join([*words, *([f"×{len(self.names):,}"] if len(self.names) > 1 else [])])


class Ways:
    """How the tensors of one rank lived. Equal ways share a number; a way is the moments at which a tensor looked
    otherwise, with the number of its cell.
    """

    def __init__(self, rank: RankTrace) -> None:
        timeline = Timeline.of_rank(rank)
        numbers: dict[Cell | None, int] = {}
        cells = (cell_of(facts) if isinstance(facts, Residency) else None for facts in rank.facts)
        looks = [numbers.setdefault(cell, len(numbers)) for cell in cells]  # 0 is None: not there
        ways: dict[Steps, int] = {}
        of_stretch = [ways.setdefault(_seen(steps, looks), len(ways)) for steps in timeline.steps]
        self._moments = timeline.moments
        self._cells = tuple(numbers)
        self._split = {number for cell, number in numbers.items() if cell is not None and cell.split}
        self.ways = tuple(ways)
        self.of = {
            (row.kind, row.model, row.name, row.part): of_stretch[s]
            for s, stretch in enumerate(timeline.stretches)
            for row in rank.rows[stretch.start : stretch.stop]
        }

    def told(self, way: int | None) -> tuple[Cell | None, ...] | None:
        """The cells of a way, moment by moment; None for a tensor that is not there."""
        return None if way is None else tuple(self._cells[n] for n in expand(self.ways[way], self._moments))

    def split(self, way: int | None) -> bool:
        """Whether a tensor that lived so was ever split."""
        return way is not None and any(number in self._split for _, number in self.ways[way])

    def inside(self, span: range) -> list[Steps]:
        """Every way as it looks inside a span and at the moment before it: did the first moment change anything?"""
        start = span.start - 1
        if start <= 0 and span.stop >= self._moments:
            return list(self.ways)
        found = []
        for way in self.ways:
            before = 0
            kept: list[tuple[int, int]] = []
            for moment, number in way:
                if moment <= start:
                    before = number
                elif moment < span.stop:
                    kept.append((moment, number))
            found.append(((start, before), *kept))
        return found


def _seen(steps: Steps, looks: Sequence[int]) -> Steps:
    """The steps at which something changed that is shown."""
    found: list[tuple[int, int]] = []
    before = 0
    for moment, facts in steps:
        if looks[facts] != before:
            before = looks[facts]
            found.append((moment, before))
    return tuple(found)


@dataclass(slots=True)
class _Group:
    """Tensors of one kind that lived alike; ``positions`` says where each stands in the model."""

    tensor: Tensor
    ways: tuple[int | None, ...]
    positions: dict[str, int]


def fold(runs: Sequence[Ways | None], spans: Sequence[range], tensors: Sequence[Tensor]) -> tuple[list[Line], int]:
    """A line per pattern of names and way of life inside the spans; and how many tensors are in no line.

    Where there are more lines than fit, splits come first, then what most tensors share, and every way of life keeps
    one line as long as there is room.
    """
    groups = _groups(runs, spans, tensors)
    several = len({model for _, model, _, _ in tensors}) > 1
    split = [any(run.split(way) for run, way in zip(runs, group.ways, strict=True) if run) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: (not split[g], -len(groups[g].positions)))
    found: list[tuple[int, Line]] = []
    for done, g in enumerate(order[:LINES], 1):
        group = groups[g]
        kind, model, _, part = group.tensor
        room = max(1, LINES - len(found) - (min(len(order), LINES) - done))
        patterns = sorted(_patterns(tuple(group.positions)), key=lambda pattern: -pattern.count)[:room]
        ways = tuple(run.told(way) if run else None for run, way in zip(runs, group.ways, strict=True))
        for pattern in patterns:
            text = f"{model}: {pattern.text}" if several else pattern.text
            label = clean(f"{text} [{part}]" if part else text)
            found.append((group.positions[pattern.names[0]], Line(label, kind, pattern.names, ways)))
    lines = [line for _, line in sorted(found, key=lambda entry: entry[0])]
    return lines, len(tensors) - sum(len(line.names) for line in lines)


def _groups(runs: Sequence[Ways | None], spans: Sequence[range], tensors: Sequence[Tensor]) -> list[_Group]:
    """The tensors by kind and by what their ways look like inside the spans."""
    known: dict[object, int] = {}  # equal looks get one number, so that they are compared once
    looks = [
        [known.setdefault(look, len(known)) for look in run.inside(span)] if run else []
        for run, span in zip(runs, spans, strict=True)
    ]
    single = len(tensors) <= SINGLE
    groups: dict[tuple[object, ...], _Group] = {}
    for at, tensor in enumerate(tensors):
        ways = tuple(run.of.get(tensor) if run else None for run in runs)
        kind, model, name, part = tensor
        look = tuple(of[way] if way is not None else None for of, way in zip(looks, ways, strict=True))
        key = (kind, model, part, look, name if single else "")
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(tensor, ways, {})
        group.positions[name] = at
    return list(groups.values())


@functools.lru_cache(maxsize=64)
def _patterns(names: tuple[str, ...]) -> list[Pattern]:
    """Ranks and phases mostly have the same groups of names."""
    return compress(names)
