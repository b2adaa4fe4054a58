"""Marks for a profiler that is not there: verl imports them wherever torch_npu is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Wrapped = TypeVar("Wrapped", bound=Callable[..., object])


class mstx:
    """Ranges that mark nothing."""

    @staticmethod
    def range_start(message: str, **_: object) -> int:
        """Return the number of no range."""
        return 0

    @staticmethod
    def range_end(range_id: int) -> None:
        """Do nothing."""

    @staticmethod
    def mstx_range(message: str, **_: object) -> Callable[[Wrapped], Wrapped]:
        """Return a decorator that changes nothing."""
        return lambda function: function
