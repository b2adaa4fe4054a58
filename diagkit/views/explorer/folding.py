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
from diagkit.views.timeline import Timeline

__all__ = ["Line", "fold"]

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


#: A number that equal ways of life share, and the way: a cell a moment.
_Way = tuple[int, tuple[Cell | None, ...]]


class _Ways:
    """How the tensors of one rank lived, equal ways shared."""

    def __init__(self, rank: RankTrace, one_of: dict[Cell | None, Cell | None]) -> None:
        self.timeline = Timeline.of_rank(rank)
        self.rows = {(row.kind, row.model, row.name, row.part): row.id for row in rank.rows}
        cells = (cell_of(f) if isinstance(f, Residency) else None for f in rank.facts)
        self._cells = [one_of.setdefault(cell, cell) for cell in cells]
        self._known: dict[tuple[int, ...], _Way] = {}
        self._of_stretch: dict[int, _Way] = {}

    def of(self, tensor: Tensor) -> _Way:
        """A number that equal ways share, and the way."""
        row = self.rows.get(tensor)
        if row is None:
            return -1, ()
        numbers = self.timeline.of(row)
        key = id(numbers)
        if key not in self._of_stretch:
            cells = tuple(self._cells[n] for n in numbers)
            self._of_stretch[key] = self._known.setdefault(numbers, (len(self._known), cells))
        return self._of_stretch[key]


def fold(
    ranks: Sequence[RankTrace | None], spans: Sequence[range], tensors: Sequence[Tensor]
) -> tuple[list[Line], int]:
    """A line per pattern of names and way of life inside the spans; and how many tensors are in no line."""
    one_of: dict[Cell | None, Cell | None] = {None: None}  # equal cells are one object, so that comparing them is cheap
    ways = [_Ways(rank, one_of) if rank else None for rank in ranks]
    seen: dict[tuple[int, int], int] = {}  # what a way looks like inside its span
    looks: dict[tuple[object, ...], int] = {}
    groups: dict[tuple[object, ...], tuple[int, Tensor, list[str], list[_Way]]] = {}
    single = len(tensors) <= SINGLE
    for at, tensor in enumerate(tensors):
        both = [way.of(tensor) if way else (-1, ()) for way in ways]
        look = []
        for r, (number, cells) in enumerate(both):
            if (r, number) not in seen:  # the moment before belongs to it: what changed at the first?
                inside = r, *map(id, cells[max(spans[r].start - 1, 0) : spans[r].stop])
                seen[r, number] = looks.setdefault(inside, len(looks))
            look.append(seen[r, number])
        kind, model, name, part = tensor
        key = (kind, model, part, *look, name if single else "")
        groups.setdefault(key, (at, tensor, [], both))[2].append(name)
    found: list[tuple[int, Line]] = []
    several = len({model for _, model, _, _ in tensors}) > 1
    for first, tensor, names, both in groups.values():
        kind, model, _, part = tensor
        for pattern in _patterns(tuple(names)):
            text = f"{model}: {pattern.text}" if several else pattern.text
            label = clean(f"{text} [{part}]" if part else text)
            line = Line(label, kind, pattern.names, tuple(cells or None for _, cells in both))
            found.append((first, line))
    if len(found) > LINES:
        found.sort(key=lambda entry: (not _split(entry[1]), -len(entry[1].names)))
    kept = sorted(found[:LINES], key=lambda entry: entry[0])
    return [line for _, line in kept], sum(len(line.names) for _, line in found[LINES:])


def _split(line: Line) -> bool:
    return any(cell.split for way in line.ways if way for cell in way if cell)


@functools.lru_cache(maxsize=64)
def _patterns(names: tuple[str, ...]) -> list[Pattern]:
    """Ranks and phases mostly have the same groups of names."""
    return compress(names)
