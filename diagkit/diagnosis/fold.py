"""Rows that lived alike are judged as one.

A rule sees of a row its facts, its group's and its owner's, and what they were before. So rows of one kind whose own
histories are equal, and whose groups' and owners' are, get equal answers for ever: one row of a class stands for all.
Ten thousand parameters that moved together are a handful of rows for the judge. Finding the classes costs what the
trace's changes cost; the passes over all rows run inside the interpreter's own loops.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from diagkit.trace import RankTrace
from diagkit.trace.schema import ABSENT, GROUP, Change, Moment, Row

__all__ = ["Fold", "Table", "fold"]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one kind and model that follow each other. The flags say what tells them apart beside their histories."""

    rows: slice
    parts: bool
    groups: bool
    owners: bool


class Table:
    """What folding needs to know of a table of rows; ranks with the same table share it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        groups = {(row.model, row.name): row.id for row in reversed(rows) if row.kind == GROUP}
        nothing = len(rows)  # the number of no group and of no owner
        self.owners = [nothing if row.of is None else row.of for row in rows]
        self.groups = [_group_of(rows, row, groups, nothing) for row in rows]
        self.parts = [row.part for row in rows]
        # Blocks are never joined, not even of one kind: whether a parameter came late is told by its place.
        self.blocks = [self._block(list(those)) for _, those in itertools.groupby(rows, lambda r: (r.kind, r.model))]

    def _block(self, rows: list[Row]) -> Block:
        those = slice(rows[0].id, rows[-1].id + 1)
        return Block(
            those,
            parts=len(set(self.parts[those])) > 1,
            groups=len(set(self.groups[those])) > 1,
            owners=any(row.of is not None for row in rows),
        )


def _group_of(rows: Sequence[Row], row: Row, groups: dict[tuple[str, str], int], nothing: int) -> int:
    """The row of the FSDP group of the nearest module around a row's parameter."""
    if row.kind == GROUP:
        return nothing
    name = row.name if row.of is None else rows[row.of].name
    model = row.model if row.of is None else rows[row.of].model
    while (found := groups.get((model, name))) is None and name:
        name = name.rpartition(".")[0]
    return nothing if found is None else found


@dataclass(slots=True)
class Fold:
    """``trace`` has one row for each class of rows; ``classes`` one character for each original row, whose code is the
    number of its class."""

    trace: RankTrace
    classes: str

    def spans(self, numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The original rows of these classes in table order, each run as its first and one past its last."""
        wanted = "".join(re.escape(chr(number)) for number in numbers)
        return (run.span() for run in re.finditer(f"[{wanted}]+", self.classes)) if wanted else iter(())


def fold(trace: RankTrace, table: Table) -> Fold:
    """The trace with one row in place of all that lived alike."""
    histories = _Histories(trace)
    lived = [*histories.rows, -1].__getitem__  # the last: of no group, of no owner
    standing: list[int] = []  # the first row of each class stands for it
    classes = ""
    for block in table.blocks:
        columns: list[Sequence[object]] = [histories.rows[block.rows]]
        if block.parts:
            columns.append(table.parts[block.rows])
        if block.groups:
            columns.append(list(map(lived, table.groups[block.rows])))
        if block.owners:
            known = dict(enumerate(classes))
            columns.append(list(map(known.get, table.owners[block.rows])))
        keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        first = dict(zip(reversed(keys), range(block.rows.stop - 1, block.rows.start - 1, -1), strict=True))
        letters = {}
        for key in sorted(first, key=first.__getitem__):
            letters[key] = chr(len(standing))
            standing.append(first[key])
        classes += "".join(map(letters.__getitem__, keys))
    new = copy.copy(trace)
    new.rows = []
    for n, at in enumerate(standing):
        row, group = table.rows[at], table.groups[at]
        # Its group is found by its name: that of the group that stands for its own, and a word that no name has.
        name = row.name if group == len(classes) else f"{table.rows[standing[ord(classes[group])]].name}.\0"
        new.rows.append(replace(row, id=n, name=name, of=None if row.of is None else ord(classes[row.of])))
    new.moments = histories.told(map(lived, standing))
    new._last = None
    return Fold(new, classes)


class _Histories:
    """Every history that some row has, as a tree: each is another one and one change more."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._tree: list[tuple[int, int, int, bool]] = [(0, -1, ABSENT, False)]  # parent, moment, facts, exchanged
        self._known: dict[tuple[int, int, int, bool], int] = {}
        self.rows = [0] * len(trace.rows)
        for moment in trace.moments:
            self._note(moment)

    def _note(self, moment: Moment) -> None:
        before, index = self.rows, moment.index
        if moment.key:  # what a whole state does not name is gone
            gone = {old: self._grown(old, index, ABSENT, False) for old in set(before)}
            self.rows = list(map(gone.__getitem__, before))
        for change in moment.changes:
            start, facts, exchanged = change.start, change.facts, change.exchanged
            if change.count == 1:
                self.rows[start] = self._grown(before[start], index, facts, exchanged)
                continue
            run = slice(start, start + change.count)
            olds = set(before[run])
            if len(olds) == 1:
                self.rows[run] = [self._grown(olds.pop(), index, facts, exchanged)] * change.count
            else:
                grown = {old: self._grown(old, index, facts, exchanged) for old in olds}
                self.rows[run] = map(grown.__getitem__, before[run])

    def _grown(self, old: int, moment: int, facts: int, exchanged: bool) -> int:
        if facts == ABSENT and self._tree[old][2] == ABSENT:
            return old
        node = (old, moment, facts, exchanged)
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = len(self._tree)
            self._tree.append(node)
        return found

    def told(self, rows: Iterable[int]) -> list[Moment]:
        """The trace's moments, with changes for rows that have these histories."""
        changes: dict[int, list[Change]] = {}
        for row, history in enumerate(rows):
            while history:
                history, moment, facts, exchanged = self._tree[history]
                if facts != ABSENT or not self._trace.moments[moment].key:
                    changes.setdefault(moment, []).append(Change(row, 1, facts, exchanged))
        return [replace(m, changes=tuple(changes.get(m.index, ()))) for m in self._trace.moments]
