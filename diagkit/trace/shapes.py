"""The shapes of a rank's shards, kept as the run lengths in which they are written: a few bytes a row."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Mapping

__all__ = ["LocalShapes", "Shape", "ShapeRuns"]

Shape = tuple[int, ...]
#: Distinct shapes; for each run of rows the number of its shape, and one past its last row (counted from the first).
ShapeRuns = tuple[list[Shape | None], "array[int]", "array[int]"]


class LocalShapes(Mapping[int, "Shape | None"]):
    """Row id -> shape on this rank; None where a row has none."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._blocks: dict[int, ShapeRuns] = {}

    def add(self, base: int, runs: ShapeRuns) -> None:
        """The shapes of the rows from ``base`` on."""
        if base not in self._blocks:
            bisect.insort(self._bases, base)
        self._blocks[base] = runs

    def __getitem__(self, row: int) -> Shape | None:
        at = bisect.bisect_right(self._bases, row) - 1
        if at >= 0:
            base = self._bases[at]
            distinct, numbers, ends = self._blocks[base]
            run = bisect.bisect_right(ends, row - base)
            if run < len(ends):
                return distinct[numbers[run]]
        raise KeyError(row)

    def __iter__(self) -> Iterator[int]:
        for at, base in enumerate(self._bases):
            ends = self._blocks[base][2]
            end = base + (ends[-1] if ends else 0)
            yield from range(base, min(end, *self._bases[at + 1 : at + 2]) if at + 1 < len(self._bases) else end)

    def __len__(self) -> int:
        return sum(1 for _ in self)
