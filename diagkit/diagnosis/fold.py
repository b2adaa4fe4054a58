"""Rows that lived alike are judged as one.

A rule sees of a row its facts, its group's and its owner's, and what they were before. So rows of one kind whose own
histories are equal, and whose groups' and owners' are, get equal answers for ever: one row of a class stands for all.
Ten thousand parameters that moved together are a handful of rows for the judge. Finding the classes costs what the
trace's changes cost; the passes over all rows run inside the interpreter's own loops.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from diagkit.trace import RankTrace
from diagkit.trace.schema import ABSENT, GROUP, Change, Moment, Row

__all__ = ["Fold", "Table", "fold"]


class Table:
    """What folding needs to know of a table of rows; ranks with the same table share it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        groups = {(row.model, row.name): row.id for row in reversed(rows) if row.kind == GROUP}
        nothing = len(rows)  # the number of no group and of no owner
        self.owners = [nothing if row.of is None else row.of for row in rows]
        self.groups = [_group_of(rows, row, groups, nothing) for row in rows]
        # Rows before and behind a block of others stay apart: whether a parameter came late is told by its place.
        kinds: dict[tuple[int, str], int] = {}
        self.kinds: list[int] = []
        block, last = 0, ("", "")
        for row in rows:
            if (row.kind, row.model) != last:
                block, last = block + 1, (row.kind, row.model)
            self.kinds.append(kinds.setdefault((block, row.part), len(kinds)))


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
    lived = [*histories.rows, -1]  # the last: of no group, of no owner
    of = lived.__getitem__
    keys = list(zip(table.kinds, lived[:-1], map(of, table.groups), map(of, table.owners), strict=True))
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    standing = sorted(first.values())  # the first row of each class stands for it, in table order
    number = {keys[row]: n for n, row in enumerate(standing)}
    classes = list(map(number.__getitem__, keys))
    new = copy.copy(trace)
    new.rows = []
    for n, at in enumerate(standing):
        row, group = table.rows[at], table.groups[at]
        # Its group is found by its name: that of the group that stands for its own, and a word that no name has.
        name = row.name if group == len(classes) else f"{table.rows[standing[classes[group]]].name}.\0"
        new.rows.append(replace(row, id=n, name=name, of=None if row.of is None else classes[row.of]))
    new.moments = histories.told(lived[row] for row in standing)
    new._last = None
    return Fold(new, "".join(map(chr, classes)))


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
        before = self.rows
        if moment.key:  # what a whole state does not name is gone
            self.rows = _mapped(before, lambda old: self._grown(old, moment.index, ABSENT, False))
        for change in moment.changes:
            run = slice(change.start, change.start + change.count)
            what = (moment.index, change.facts, change.exchanged)
            self.rows[run] = _mapped(before[run], lambda old, what=what: self._grown(old, *what))  # type: ignore[misc]

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


def _mapped(values: list[int], to: Callable[[int], int]) -> list[int]:
    """Each value by what it becomes; equal values are asked for once."""
    distinct = set(values)
    if len(distinct) == 1:
        return [to(values[0])] * len(values)
    return list(map({value: to(value) for value in distinct}.__getitem__, values))
