"""What a recording without a word in the code is told by its environment, or by the options of ``diagkit run``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from diagkit.errors import UsageError
from diagkit.trace.schema import DETAILS
from diagkit.trace.spans import in_spans, parse_spans

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Options:
    """How to record. Every field has an environment variable (`VARIABLES`), read where nothing else was said."""

    out: str = ""  # folder of runs; each run makes a folder of its own in it
    detail: str = "transitions"
    ranks: str = ""  # "0-3,7": only these are recorded; "": all
    include: tuple[str, ...] = ()  # only tensors whose name fits one of these patterns
    exclude: tuple[str, ...] = ()  # ... and none of these
    limit: int = 0  # bytes of trace per rank, 0: none
    quiet: float = 300.0  # seconds without a sign of life after which a rank says where it stands; 0: never
    engines: tuple[str, ...] = ()  # further classes of engines, "package.module:Class"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """The options that the environment names.

        Raises:
            UsageError: a variable that makes no sense.
        """
        said = {name: environment[variable] for name, variable in VARIABLES.items() if environment.get(variable)}
        return cls().saying(said, lambda name: VARIABLES[name])

    def saying(self, said: Mapping[str, str], named: Callable[[str], str] = lambda name: f"--{name}") -> Options:
        """These options with some of them as texts; ``named`` says how the user calls an option.

        Raises:
            UsageError: a text that makes no sense.
        """
        found: dict[str, Any] = {}
        for name, text in said.items():
            try:
                found[name] = _PARSERS[name](text)
            except ValueError as error:
                raise UsageError(f"{named(name)} makes no sense", found=text, expected=str(error)) from None
        return replace(self, **found)

    def records(self, rank: int) -> bool:
        """Whether this rank is recorded.

        >>> [Options(ranks="0-2,7").records(rank) for rank in (0, 2, 3, 7)]
        [True, True, False, True]
        """
        return not self.ranks or in_spans(rank, parse_spans(self.ranks))

    def wants(self, name: str) -> bool:
        """Whether a tensor of this name is watched."""
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def told(self) -> dict[str, str]:
        """What of this a reader of the trace must know, for its header: which ranks and tensors were left out."""
        found = {"ranks": self.ranks, "include": ", ".join(self.include), "exclude": ", ".join(self.exclude)}
        return {f"diagkit.{name}": text for name, text in found.items() if text}


def _ranks(text: str) -> str:
    parse_spans(text)
    return text.replace(" ", "")


def _detail(text: str) -> str:
    if text not in DETAILS:
        raise ValueError(f"one of {', '.join(DETAILS)}")
    return text


def _limit(text: str) -> int:
    match = re.fullmatch(r"\s*(\d{1,12})\s*([KMG]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("a size such as 200M")
    return int(match[1]) * _SIZES[match[2].upper()]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ValueError("seconds, such as 300 (0: never)")
    return seconds


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _engines(text: str) -> tuple[str, ...]:
    found = _list(text)
    if not all(re.fullmatch(r"[\w.]+:[\w.]+", one) for one in found):
        raise ValueError("classes such as package.module:Class")
    return found


_PARSERS: dict[str, Callable[[str], Any]] = {
    "out": str,
    "detail": _detail,
    "ranks": _ranks,
    "include": _list,
    "exclude": _list,
    "limit": _limit,
    "quiet": _seconds,
    "engines": _engines,
}
#: Option -> environment variable.
VARIABLES = {f.name: f"DIAGKIT_{f.name.upper()}" for f in fields(Options)} | {"out": "DIAGKIT_TRACE"}
