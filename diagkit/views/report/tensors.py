"""Where every tensor is at the moment that counts, and which ranks have it otherwise.

The rules: ranks are compared by what a reader would see, so the index of a device and a shard without elements make no
difference; what many ranks have alike is one line; cost follows what differs, not ranks times tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from diagkit.trace import RankTrace, Trace
from diagkit.trace.patterns import compress
from diagkit.trace.schema import TENSOR_KINDS, Facts, Residency, device_type
from diagkit.trace.table import ResidencyLine, ResidencyTable

__all__ = ["Difference", "Tensors", "tensors"]

#: Lines of each table; what is beyond is counted.
LINES = 400
DIFFERENCES = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """Tensors that are elsewhere on these ranks than on the one they are held beside; all as short residencies."""

    pattern: str
    count: int
    here: str
    there: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensors:
    """``moment`` is a moment's label; ``alike`` counts the ranks that ended like rank ``beside``.

    ``lines_left_out`` counts lines, ``differences_left_out`` tensors.
    """

    rank: int
    moment: str
    lines: tuple[ResidencyLine, ...]
    lines_left_out: int
    beside: int
    compared: int
    alike: int
    differences: tuple[Difference, ...]
    differences_left_out: int

    @property
    def total(self) -> int:
        """How many tensors the lines stand for."""
        return sum(line.count for line in self.lines)


def tensors(trace: Trace, told: RankTrace, moment: int | None) -> Tensors:
    """The tensors of one rank after a moment (None: the last at which they lived), and how ranks differ at the end.

    Where nothing failed, ranks are held beside the first one: that an odd rank is told makes all others no exceptions.
    """
    at = moment if moment is not None else told.living
    lines = ResidencyTable.at(told, at, kinds=TENSOR_KINDS).lines if told.moments else ()
    beside = told if moment is not None else next(iter(trace))
    others = [rank for rank in trace if rank is not beside and rank.moments]
    found, left_out, unlike = _compare(beside, others) if beside.moments else ([], 0, set())
    return Tensors(
        told.rank,
        told.moments[at].label if told.moments else "",
        lines[:LINES],
        max(0, len(lines) - LINES),
        beside.rank,
        len(others),
        len(others) - len(unlike),
        tuple(found[:DIFFERENCES]),
        left_out + sum(line.count for line in found[DIFFERENCES:]),
    )


def _compare(beside: RankTrace, others: list[RankTrace]) -> tuple[list[Difference], int, set[int]]:
    mine = _shown(beside)
    same_row: dict[tuple[int, str], set[int]] = {}  # (row, what it is there) -> ranks
    unlike: set[int] = set()
    for rank in others:
        theirs = _shown(rank)
        if mine == theirs:
            continue
        for row, (here, there) in enumerate(zip_longest(mine, theirs, fillvalue="-")):
            if here != there and here and there:
                same_row.setdefault((row, there), set()).add(rank.rank)
                unlike.add(rank.rank)
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for (row, there), on in same_row.items():
        groups.setdefault((_at(mine, row), there, tuple(sorted(on))), []).append(row)
    rows = max([beside, *others], key=lambda rank: len(rank.rows)).rows
    found: list[Difference] = []
    left_out = 0
    for (here, there, ranks), members in sorted(groups.items(), key=lambda group: -len(group[1]) * len(group[0][2])):
        if len(found) >= DIFFERENCES:
            left_out += len(members)
            continue
        patterns = compress(rows[member].label for member in members)
        found += [Difference(pattern.text, pattern.count, here, there, ranks) for pattern in patterns]
    return found, left_out, unlike


def _at(shown: list[str], row: int) -> str:
    return shown[row] if row < len(shown) else "-"


def _shown(rank: RankTrace) -> list[str]:
    """What a reader would see of each row at the end: "" for what no rank is blamed for."""
    words = [_word(facts) for facts in rank.facts]
    return [
        words[number] if row.kind in TENSOR_KINDS else ""
        for row, number in zip(rank.rows, rank.state(rank.living).facts, strict=True)
    ]


def _word(facts: Facts | None) -> str:
    if not isinstance(facts, Residency):
        return "-" if facts is None else ""
    if facts.empty:
        return ""
    place = f"{device_type(facts.metadata_device)}/{device_type(facts.storage_device) or '?'}"
    return f"{place} pinned" if facts.pinned else place
