"""Every row's facts at every moment of one rank, told by what changed: rows that always changed together are one
stretch, and a stretch is the few moments at which it did.

A model of 10,000 parameters has as many stretches as its trace has different borders of changes, mostly a few hundred.
The work grows with the changes in the trace, not with parameters times moments.
"""

from __future__ import annotations

from bisect import bisect_right
from weakref import WeakKeyDictionary

from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import ABSENT, Row

__all__ = ["Steps", "Timeline", "expand"]

#: Moments at which something became otherwise, in order, and what it then was; before the first it was 0.
Steps = tuple[tuple[int, int], ...]


class Timeline:
    """``stretches`` are ranges of row numbers in order; ``steps[s]`` are the moments at which the rows of stretch ``s``
    got other facts, with the facts (a number of `RankTrace.facts`, 0: not there).
    """

    def __init__(self, rank: RankTrace) -> None:
        self.moments = len(rank.moments)
        edges = {0, len(rank.rows)}
        for moment in rank.moments:
            for change in moment.changes:
                edges.update((change.start, change.start + change.count))
        edges.update(i for i in range(1, len(rank.rows)) if _kind(rank.rows[i]) != _kind(rank.rows[i - 1]))
        self._edges = sorted(edges)
        self.stretches = tuple(range(a, b) for a, b in zip(self._edges, self._edges[1:], strict=False))
        self.steps: tuple[Steps, ...] = tuple(map(tuple, self._steps(rank)))

    def _steps(self, rank: RankTrace) -> list[list[tuple[int, int]]]:
        steps: list[list[tuple[int, int]]] = [[] for _ in self.stretches]
        now = [ABSENT] * len(self.stretches)
        at = {edge: s for s, edge in enumerate(self._edges)}
        for moment in rank.moments:
            left = set(range(len(now))) if moment.key else set()  # rows that a whole state does not name are gone
            for change in moment.changes:
                for s in range(at[change.start], at[change.start + change.count]):
                    left.discard(s)
                    if now[s] != change.facts:
                        now[s] = change.facts
                        steps[s].append((moment.index, change.facts))
            for s in left:
                if now[s] != ABSENT:
                    now[s] = ABSENT
                    steps[s].append((moment.index, ABSENT))
        return steps

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
        return expand(self.steps[bisect_right(self._edges, row) - 1], self.moments)


def expand(steps: Steps, moments: int) -> tuple[int, ...]:
    """What it was at each of so many moments.

    >>> expand(((1, 7), (3, 0)), 5)
    (0, 7, 7, 0, 0)
    """
    found: list[int] = []
    value = 0
    for moment, after in steps:
        found += [value] * (moment - len(found))
        value = after
    return tuple(found + [value] * (moments - len(found)))


_known: WeakKeyDictionary[RankTrace, tuple[tuple[int, int], Timeline]] = WeakKeyDictionary()


def _kind(row: Row) -> tuple[str, str, str]:
    return row.kind, row.model, row.part
