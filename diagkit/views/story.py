"""What one rank's trace shows, as columns and histories: which moments matter, and what each tensor was at them.

The rules: a moment matters when something that is shown changed there, failed, or began or ended there; whatever is
left out is counted; a history is what a reader would see, so tensors with equal histories may share one line and no
others may.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diagkit.errors import UsageError
from diagkit.language import tr
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import ABSENT, CALL, ENTER, EXIT, FAILURE, MARK, TENSOR_KINDS, Facts, Moment, Phase, Residency
from diagkit.trace.values import series

__all__ = ["Cell", "Column", "Story", "Tensor", "cell_of", "choose", "named", "tell"]

#: Who a row is, in whatever trace: kind, model, name, part.
Tensor = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown of one tensor at one moment. ``storage`` is None where it could not be read."""

    metadata: str
    storage: str | None
    pinned: bool = False
    split: bool = False
    apart: bool = False  # the tensor that trains is not the one that FSDP2 gathers

    def __str__(self) -> str:
        """``"npu:0/cpu pinned, split"``; one device alone where both agree."""
        place = self.metadata if self.storage == self.metadata else f"{self.metadata}/{self.storage or '?'}"
        words = [f"{place} pinned" if self.pinned else place]
        return ", ".join(words + [tr("split")] * self.split + [tr("not the gathered tensor")] * self.apart)


@dataclass(frozen=True, slots=True)
class Column:
    """One moment. ``splits`` counts the tensors split then, ``changed`` says whether anything shown changed there."""

    moment: Moment
    phase: Phase
    changed: bool
    splits: int
    present: int

    @property
    def failed(self) -> bool:
        return self.moment.failure is not None


@dataclass(frozen=True, slots=True)
class Story:
    """``tensors[i]`` was ``cells[histories[i][c]]`` at ``columns[c]``; ``cells[0]`` is None: not there."""

    rank: RankTrace
    every: tuple[Column, ...]  # all moments
    columns: tuple[Column, ...]  # those that are shown
    tensors: tuple[Tensor, ...]
    cells: tuple[Cell | None, ...]
    histories: tuple[tuple[int, ...], ...]
    subject: str = ""  # the name of the one tensor that it is about

    @property
    def left_out(self) -> int:
        return len(self.every) - len(self.columns)

    def at(self, column: int) -> list[Cell | None]:
        """Every tensor's cell at one column."""
        return [self.cells[history[column]] for history in self.histories]


def tell(
    rank: RankTrace,
    *,
    phase: str | None = None,
    moments: int | Sequence[int] = 8,
    kinds: Iterable[str] = ("parameter", "buffer"),
    only: str | Iterable[str] | None = None,
) -> Story:
    """The story of one rank: of all phases or those of one name; at most so many moments, or just those of these
    indices; tensors in the order of ``kinds``.

    Raises:
        UsageError: no such phase or moment, an unknown kind, or nothing to show.
    """
    kinds = tuple(kinds)
    if unknown := [kind for kind in kinds if kind not in TENSOR_KINDS]:
        raise UsageError("unknown kind of tensor", found=unknown[0], expected=f"one of {', '.join(TENSOR_KINDS)}")
    rows = [row for row in rank.rows if row.kind in kinds and (only is None or named(row.name, only))]
    rows.sort(key=lambda row: kinds.index(row.kind))
    chosen = _moments_of(rank, phase)
    if not rows or not chosen:
        raise UsageError("nothing to show", found=f"{len(rows)} tensors, {len(chosen)} moments", where=rank.path)
    cells, number = _cells(rank.facts)
    seen: list[tuple[Column, tuple[int, ...]]] = []
    before: tuple[int, ...] | None = None
    for moment in chosen:
        facts = rank.state(moment).facts
        now = tuple(number[facts[row.id]] for row in rows)
        seen.append((_column(rank, moment, cells, now, before), now))
        before = now
    every = tuple(column for column, _ in seen)
    kept = choose(every, moments, rank)
    return Story(
        rank,
        every,
        tuple(every[i] for i in kept),
        tuple((row.kind, row.model, row.name, row.part) for row in rows),
        cells,
        tuple(zip(*(seen[i][1] for i in kept), strict=True)),
    )


def named(name: str, wanted: str | Iterable[str]) -> bool:
    """Whether a name matches one of these shell patterns or holds one of these texts."""
    patterns = (wanted,) if isinstance(wanted, str) else wanted
    return any(fnmatch.fnmatchcase(name, pattern) or pattern in name for pattern in patterns)


def _moments_of(rank: RankTrace, phase: str | None) -> list[Moment]:
    if phase is None:
        return rank.moments
    wanted = {ordinal for ordinal, p in rank.phases.items() if p.name == phase and ordinal}
    if not wanted:
        names = ", ".join(dict.fromkeys(p.name for p in rank.phases.values() if p.name))
        raise UsageError("no such phase in this trace", found=phase, expected=f"one of {names}" if names else None)
    for ordinal, p in rank.phases.items():  # in the order in which they began, so parents come first
        if p.parent in wanted:
            wanted.add(ordinal)
    return [moment for moment in rank.moments if moment.phase in wanted]


def _cells(facts: Sequence[Facts | None]) -> tuple[tuple[Cell | None, ...], list[int]]:
    """The distinct cells, and for each number of facts the number of its cell: facts that look alike share one."""
    cells: dict[Cell | None, int] = {None: 0}
    number = []
    for fact in facts:
        cell = cell_of(fact) if isinstance(fact, Residency) else None
        number.append(cells.setdefault(cell, len(cells)))
    return tuple(cells), number


def cell_of(fact: Residency) -> Cell:
    """What is shown of these facts."""
    return Cell(
        fact.metadata_device,
        fact.storage_device,
        # Nothing can be pinned where there are no bytes: a rank without a shard must not look like a lost pin.
        pinned=bool(fact.pinned) or (fact.empty and bool(fact.flat_pinned)),
        split=fact.split,
        apart=not fact.empty and (fact.aliased is False or fact.registered is False),
    )


def _column(
    rank: RankTrace, moment: Moment, cells: Sequence[Cell | None], now: tuple[int, ...], before: tuple[int, ...] | None
) -> Column:
    split = {i for i, cell in enumerate(cells) if cell is not None and cell.split}
    return Column(
        moment,
        rank.phases.get(moment.phase, rank.phases[0]),
        changed=before is not None and now != before and any(before),
        splits=sum(number in split for number in now),
        present=sum(number != ABSENT for number in now),
    )


def choose(columns: Sequence[Column], moments: int | Sequence[int], rank: RankTrace) -> list[int]:
    """The positions of the moments that tell most, at most so many; or of those with these indices.

    Raises:
        UsageError: no such moment, or none is wanted.
    """
    if not isinstance(moments, int):
        position = {column.moment.index: i for i, column in enumerate(columns)}
        if wrong := [m for m in moments if m not in position]:
            raise UsageError("no such moment in this trace", found=wrong[0], expected=f"0 to {len(rank.moments) - 1}")
        return sorted({position[m] for m in moments})
    if moments < 1:
        raise UsageError("a figure needs at least one moment", found=moments)
    weights = _weights(columns)
    # Equal weights: the later one tells more of how it ended, save for the first failure, which weighs more anyway.
    best = sorted((i for i in range(len(columns)) if weights[i] > 0), key=lambda i: (-weights[i], -i))[:moments]
    return sorted(best) or [len(columns) - 1]


def _weights(columns: Sequence[Column]) -> list[int]:
    """How much each moment matters. Of a cycle of many steps the first is told, beside that in which it first failed
    and the end: its most telling moments again and again would tell no more, and hide what lies between them.
    """
    failed = next((column.phase for column in columns if column.failed), None)
    told: set[tuple[object, ...]] = set()
    weights = []
    for i, column in enumerate(columns):
        moment, weight = column.moment, _weight(columns, i)
        what = (moment.kind, series(moment.label), series(column.phase.name))
        event = (*what, column.splits, column.present, column.changed)
        again = event in told and column.phase is not failed and i < len(columns) - 1
        weights.append(min(1, weight) if again else weight)
        told.add(event)
    return weights


def _weight(columns: Sequence[Column], i: int) -> int:
    """How much a moment matters; 0 for one that repeats its neighbour."""
    column, before = columns[i], columns[i - 1] if i else None
    if column.present == 0:
        return 0
    if column.moment.failure is not None:
        return 10 if not any(c.failed for c in columns[:i]) else 4
    if column.splits and not (before and before.splits):
        return 9
    if before is None or not before.present:
        return 8  # the state it all began with
    if column.splits != before.splits:
        return 7
    if column.changed:
        return 6
    if column.moment.kind == EXIT:
        # After a failure the phase's end says nothing new.
        return 0 if before.failed or (before.moment.kind == FAILURE) else (5 if i == len(columns) - 1 else 3)
    if column.moment.kind == ENTER:  # what a phase begins with is what the one before ended with
        return 0 if before.moment.kind in (EXIT, MARK) else 2
    return 1 if column.moment.kind == CALL else 0
