"""Follows one function statement by statement, and tells after which of them something that one looks at had changed.

Rules of this module: for teaching only. It uses Python's own tracing (``sys.settrace``), as a debugger does, so it
slows the call down, and it puts back whatever traced before.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

__all__ = ["Step", "follow"]


@dataclass(frozen=True, slots=True)
class Step:
    """One statement that ran: its source on one line, what was seen after it, and whether that was different before."""

    source: str
    seen: object
    changed: bool


def follow(
    function: FunctionType, call: Callable[[], object], look: Callable[[Mapping[str, Any]], object]
) -> list[Step]:
    """Run ``call()``, and follow the first run of ``function`` inside it.

    ``look`` gets the function's local variables after every statement, and returns what is compared: something that
    does not change by itself, such as a text. What ``call`` raises passes through.

    >>> def double(x):
    ...     y = x + x
    ...     return y
    >>> [step.source for step in follow(double, lambda: double(2), lambda local: local.get("y")) if step.changed]
    ['y = x + x']
    """
    sources = _sources(function)
    steps: list[Step] = []
    running: tuple[str, object] | None = None  # a statement, and what was seen before it
    found = False

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal running
        source = sources.get(frame.f_lineno, "")
        if event == "exception" or (event == "line" and running is not None and running[0] == source):
            return at_line  # a further line of the same statement, or the way to its end
        seen = look(frame.f_locals)
        if running is not None:
            steps.append(Step(running[0], seen, seen != running[1]))
        running = source, seen
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        if found or frame.f_code is not function.__code__:
            return None
        found = True
        return at_line

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def _sources(function: FunctionType) -> dict[int, str]:
    """For every line of the function the statement that it belongs to, without comments; of a compound one the head."""
    lines, first = inspect.getsourcelines(function)
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            source = ast.unparse(node).splitlines()[0] if body else " ".join(ast.unparse(node).split())
            found.update(dict.fromkeys(range(first + node.lineno - 1, first + (end or node.lineno)), source))
    return found
