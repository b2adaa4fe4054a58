"""Every row's facts at every moment of one rank, without a line per row: rows that always changed together are one
stretch.

A model of 10,000 parameters has as many stretches as its trace has different borders of changes, mostly a few hundred;
the work grows with them and with the changes, not with parameters times moments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from weakref import WeakKeyDictionary

from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import ABSENT, Row

__all__ = ["Timeline"]


class Timeline:
    """``stretches`` are ranges of row numbers in order; ``numbers[s][m]`` are the facts (a number of `RankTrace.facts`,
    0: not there) of every row of stretch ``s`` right after moment ``m``.
    """

    def __init__(self, rank: RankTrace) -> None:
        edges = {0, len(rank.rows)}
        for moment in rank.moments:
            for change in moment.changes:
                edges.update((change.start, change.start + change.count))
        edges.update(i for i in range(1, len(rank.rows)) if _kind(rank.rows[i]) != _kind(rank.rows[i - 1]))
        self._edges = sorted(edges)
        self.stretches = tuple(range(a, b) for a, b in zip(self._edges, self._edges[1:], strict=False))
        self.numbers: tuple[tuple[int, ...], ...] = tuple(zip(*self._columns(rank), strict=True))

    def _columns(self, rank: RankTrace) -> list[list[int]]:
        now = [ABSENT] * len(self.stretches)
        columns = []
        for moment in rank.moments:
            if moment.key:
                now = [ABSENT] * len(now)
            for change in moment.changes:
                first = bisect_left(self._edges, change.start)
                last = bisect_left(self._edges, change.start + change.count)
                now[first:last] = [change.facts] * (last - first)
            columns.append(now.copy())
        return columns

    @classmethod
    def of_rank(cls, rank: RankTrace) -> Timeline:
        """The rank's timeline, made once as long as nothing is added to the trace."""
        size = len(rank.rows), len(rank.moments)
        known = _known.get(rank)
        if known is None or known[0] != size:
            known = _known[rank] = size, cls(rank)
        return known[1]

    def of(self, row: int) -> tuple[int, ...]:
        """One row's facts, moment by moment."""
        return self.numbers[bisect_right(self._edges, row) - 1]


_known: WeakKeyDictionary[RankTrace, tuple[tuple[int, int], Timeline]] = WeakKeyDictionary()


def _kind(row: Row) -> tuple[str, str, str]:
    return row.kind, row.model, row.part
