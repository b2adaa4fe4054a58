"""In which language diagkit tells what it found.

English is written in the code; the other languages are gettext catalogues in ``diagkit/catalogues``, made by ``make
translations``. The rules:

* a sentence is translated where it is made (`tr`) or, if it stands in a table, where it is read (`msg` marks it there);
* names, devices, codes of hazards and other people's texts go in as values and are never translated;
* what has no entry stays English: a report half translated is better than none.

Standard library alone, so that diagnosis can speak inside a training job.
"""

from __future__ import annotations

import contextlib
import functools
import gettext
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from diagkit.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["LANGUAGES", "add_argument", "chosen", "language", "msg", "msgn", "tr", "trn"]

LANGUAGES = ("en", "zh")

_chosen: ContextVar[str] = ContextVar("diagkit_language", default="en")


@contextlib.contextmanager
def language(name: str) -> Iterator[None]:
    """Inside the block everything is told in this language, in this thread.

    Raises:
        UsageError: there is no such language.

    >>> with language("en"):
    ...     tr("{count} ranks", count=2)
    '2 ranks'
    """
    if name not in LANGUAGES:
        raise UsageError("unknown language", found=name, expected=f"one of {', '.join(LANGUAGES)}")
    before = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(before)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option ``--lang`` of a command; the command line then runs the command in that language."""
    parser.add_argument("--lang", choices=LANGUAGES, default="en", help="the language of the sentences (default: en)")


def chosen() -> str:
    """The language that is spoken now."""
    return _chosen.get()


def tr(text: str, /, **values: object) -> str:
    """The text in the chosen language, with the values in their places."""
    told = _catalogue(_chosen.get()).gettext(text) if text else text
    return told.format(**values) if values else told


def trn(one: str, many: str, count: int, /, **values: object) -> str:
    """The text for one or for many, in the chosen language; ``{count}`` is the number, with separators."""
    told = _catalogue(_chosen.get()).ngettext(one, many, count)
    return told.format(count=f"{count:,}", **values)


def msg(text: str) -> str:
    """The text as it is: marks an entry of a table for the catalogues, for `tr` to translate when it is read."""
    return text


def msgn(one: str, many: str) -> tuple[str, str]:
    """The same of a text for one and for many, for `trn`."""
    return one, many


@functools.cache
def _catalogue(name: str) -> gettext.NullTranslations:
    file = Path(__file__).parent / "catalogues" / f"{name}.mo"
    try:
        with file.open("rb") as stream:
            return gettext.GNUTranslations(stream)
    except OSError:  # English has none
        return gettext.NullTranslations()
