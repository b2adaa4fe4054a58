"""Follows what an engine's operation hands back: generators until they are consumed, contexts until they are left.

What comes out is what went in: the same values in the same order, each let go at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

Phase = Callable[[], AbstractContextManager[None]]
Watch = Callable[[Iterator[Any]], Iterator[Any]]


def followed(result: Any, phase: Phase, watch: Watch, contexts: bool) -> Any:
    """The result, with every iterator in it (one level deep in tuples, lists and dicts) followed in a phase of its own;
    a coroutine runs, and a context (where ``contexts``) is entered, inside the phase."""
    if inspect.iscoroutine(result):
        return _awaited(result, phase, watch, contexts)
    if contexts and hasattr(type(result), "__enter__") and hasattr(type(result), "__exit__"):
        return Followed(result, phase)
    if _consumable(result):
        return _consumed(result, phase, watch)
    if isinstance(result, tuple) and any(map(_consumable, result)):
        parts = [_consumed(part, phase, watch) if _consumable(part) else part for part in result]
        make = getattr(type(result), "_make", None)  # a named tuple takes its fields apart
        return make(parts) if make is not None else type(result)(parts)
    if isinstance(result, list):
        for n, part in enumerate(result):
            if _consumable(part):
                result[n] = _consumed(part, phase, watch)
    elif isinstance(result, dict):
        for key, part in list(result.items()):
            if _consumable(part):
                result[key] = _consumed(part, phase, watch)
    return result


def _consumable(value: object) -> bool:
    """Generators and other lazy iterators; not files and the like, which are iterators by the way."""
    if inspect.isgenerator(value):
        return True
    return type(value) in (map, filter, zip) or (
        hasattr(type(value), "__next__")
        and hasattr(type(value), "__iter__")
        and not hasattr(type(value), "read")
        and not hasattr(type(value), "__len__")
    )


def _consumed(iterator: Iterator[Any], phase: Phase, watch: Watch) -> Iterator[Any]:
    with phase():
        yield from watch(iterator)


async def _awaited(coroutine: Any, phase: Phase, watch: Watch, contexts: bool) -> Any:
    with phase():
        result = await coroutine
    return followed(result, phase, watch, contexts)


class Followed:
    """A context manager whose block is a phase: ``with engine.train_mode(): ...``. All else is the engine's own."""

    def __init__(self, inner: Any, phase: Phase) -> None:
        self._inner = inner
        self._phase = phase
        self._open: list[AbstractContextManager[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> Any:
        phase = self._phase()
        phase.__enter__()
        try:
            entered = self._inner.__enter__()
        except BaseException as error:
            phase.__exit__(type(error), error, error.__traceback__)
            raise
        self._open.append(phase)
        return self if entered is self._inner else entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Any:
        phase = self._open.pop()
        try:
            swallowed = self._inner.__exit__(kind, error, traceback)
        except BaseException as leaving:
            phase.__exit__(type(leaving), leaving, leaving.__traceback__)
            raise
        if swallowed:
            kind = error = traceback = None
        phase.__exit__(kind, error, traceback)
        return swallowed
