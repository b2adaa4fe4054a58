"""Takes single values out of a parsed line of a trace, trusting none of them: wrong types and absurd sizes raise."""

from __future__ import annotations

import itertools
import re
from array import array as packed
from collections.abc import Mapping
from typing import Any

from diagkit.trace.schema import Cause, Failure, Frame
from diagkit.trace.shapes import Shape, ShapeRuns

_NUMBER = re.compile(r"[0-9]+")
# No harm in a file, but in a terminal, a page or an encoder: control characters, those that turn the direction of what
# follows or end a line, and halves of surrogate pairs.
_SUSPECT = re.compile(rb"\\u(?:00|061c|20[026]|feff|d[89a-f])", re.IGNORECASE)
_TURNING = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_CONTROL = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), *range(127, 160), *_TURNING) if n not in (9, 10)}


class Malformed(ValueError):
    """One event cannot be used; the message says why."""


def suspect(line: bytes) -> bool:
    """Whether the texts of a line may hold characters that `clean` takes out."""
    return not line.isascii() or _SUSPECT.search(line) is not None


def clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_CONTROL).encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): clean(item) for name, item in value.items()}
    return value


def whole(event: Mapping[str, Any], name: str) -> int:
    value = event.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise Malformed(f"{name}: expected a number from 0, found {clip(repr(value))}")
    return value


def real(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else 0.0


def array(event: Mapping[str, Any], name: str, default: list[Any] | None = None) -> list[Any]:
    value = event.get(name, default)
    if not isinstance(value, list):
        raise Malformed(f"{name}: expected a list, found {clip(repr(value))}")
    return value


def mapping(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def expand(runs: object, count: int) -> list[Shape | None]:
    """The inverse of the writer's run lengths, row by row; all None where there are none."""
    if runs is None:
        return [None] * count
    shapes, numbers, ends = shape_runs(runs, count)
    starts = (0, *ends[:-1])
    return [s for number, a, b in zip(numbers, starts, ends, strict=True) for s in [shapes[number]] * (b - a)]


def shape_runs(runs: object, count: int) -> ShapeRuns:
    """The writer's run lengths, checked: they are for at most ``count`` rows."""
    if not (isinstance(runs, list) and len(runs) == 2 and all(isinstance(part, list) for part in runs)):
        raise Malformed("shapes that are not run lengths")
    distinct = [tuple(int(n) for n in value) if isinstance(value, list) else None for value in runs[0]]
    try:
        numbers, lengths = (packed("Q", runs[1][first : len(runs[1]) // 2 * 2 : 2]) for first in (0, 1))
        ends = packed("Q", itertools.accumulate(lengths))
    except (TypeError, OverflowError):
        raise Malformed("run lengths beyond the table") from None
    if ends and ends[-1] > count:
        raise Malformed("run lengths beyond the table")
    if numbers and max(numbers) >= len(distinct):
        raise Malformed(f"a shape numbered {max(numbers)}, there are {len(distinct)}")
    return distinct, numbers, ends


def cause(data: Any) -> Cause:
    if not isinstance(data, dict):
        raise Malformed("a cause that is no object")
    stack = data.get("stack")
    chain = data.get("chain")
    return Cause(
        operation=clip(str(data.get("operation", "")), 500),
        chain=tuple(clip(str(part), 500) for part in chain[:100]) if isinstance(chain, list) else (),
        frame=frame(data.get("frame")),
        stack=tuple(f for f in map(frame, stack[:100]) if f) if isinstance(stack, list) else (),
        target=clip(str(data.get("target", "")), 500),
        request=clip(str(data.get("request", "")), 500),
    )


def frame(data: Any) -> Frame | None:
    if not isinstance(data, dict):
        return None
    line = data.get("line")
    return Frame(
        file=clip(str(data.get("file", "")), 1000),
        line=line if isinstance(line, int) and 0 <= line < 1 << 31 else 0,
        function=clip(str(data.get("function", "")), 500),
        code=clip(str(data.get("code", "")), 500),
    )


def failure(data: Mapping[str, Any]) -> Failure:
    return Failure(
        type=clip(str(data.get("type", "")), 200),
        message=clip(str(data.get("message", "")), 4000),
        operation=clip(str(data.get("operation", "")), 500),
        asks=clip(str(data.get("asks", "")), 500),
    )


def shallow(value: Any, depth: int = 6) -> Any:
    """Plain data of bounded depth; what lies deeper is left out."""
    if isinstance(value, dict):
        return {clip(name): shallow(inner, depth - 1) for name, inner in value.items()} if depth else "..."
    if isinstance(value, list):
        return [shallow(inner, depth - 1) for inner in value] if depth else "..."
    return clip(value, 4000) if isinstance(value, str) else value


def clip(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def series(text: str) -> str:
    """What the steps of a loop have in common: a text without its numbers.

    >>> series("step 12: enter")
    'step : enter'
    """
    return _NUMBER.sub("", text)


def middle(text: str, limit: int) -> str:
    """The text with its middle left out where it is longer: of a name, both ends tell something.

    >>> middle("model.layers.0.self_attn.q_proj.weight", 20)
    'model....proj.weight'
    """
    return text if len(text) <= limit else f"{text[: limit // 3]}...{text[limit // 3 + 3 - limit :]}"


def printable(text: str) -> str:
    """The text with control and direction characters written out: traces come from strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
