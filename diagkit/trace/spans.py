"""Ranks as people write them: ``0-3,7``."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable


def parse_spans(text: str) -> list[tuple[int, int]]:
    """First and last of each span, ascending; spans that touch are one.

    Raises:
        ValueError: it is no list of ranks.

    >>> parse_spans("7,0-3,4")
    [(0, 4), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if match is None:
            raise ValueError("ranks such as 0-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError("ranks such as 0-3,7, in each span the lower one first")
        found.append((first, last))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def in_spans(rank: int, spans: list[tuple[int, int]]) -> bool:
    """Whether one of the spans, as `parse_spans` gives them, holds the rank."""
    at = bisect.bisect_right(spans, (rank, 1 << 62)) - 1
    return at >= 0 and rank <= spans[at][1]


def spans_text(ranks: Iterable[int]) -> str:
    """Ascending ranks as people read them.

    >>> spans_text([0, 1, 2, 5, 7, 8])
    '0..2, 5, 7, 8'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}..{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans)
