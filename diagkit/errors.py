"""The one tree of errors that diagkit raises on purpose.

Rules: every message fits on one line and says what went wrong, what was found, what was expected, where, and what to
do. The command line prints that line and leaves with exit code 2. Whatever is not a :class:`DiagkitError` is a fault
of diagkit itself and keeps its traceback.
"""

from __future__ import annotations

import os

__all__ = [
    "DiagkitError",
    "EngineError",
    "MissingDependency",
    "MoveBlocked",
    "RanksDisagree",
    "SimulatorError",
    "TraceError",
    "UnsupportedTorch",
    "UsageError",
]


class DiagkitError(Exception):
    """Something that diagkit was asked to do cannot be done, and the message says how to mend it.

    ``what`` is a clause without a full stop; ``found``, ``expected`` and ``where`` are values or short phrases
    (a path is shown as it is written, anything else but a string by its ``repr``); ``remedy`` is a sentence in the
    imperative.

    >>> str(UsageError("unknown engine", found="vomni", expected="fsdp or veomni", remedy="Choose one of the two"))
    'unknown engine: found vomni, expected fsdp or veomni. Choose one of the two.'
    """

    def __init__(
        self,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.found = found
        self.expected = expected
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        facts = []
        if self.found is not None:
            facts.append(f"found {_plain(self.found)}")
        if self.expected is not None:
            facts.append(f"expected {_plain(self.expected)}")
        text = self.what + (": " + ", ".join(facts) if facts else "")
        if self.where is not None:
            text += f" (at {_plain(self.where)})"
        if self.remedy:
            text += f". {self.remedy.rstrip('.')}."
        return " ".join(text.split())

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional arguments; ours carry keywords, and ranks send their errors to a parent.
        return (_rebuild, (type(self), self.what, self.found, self.expected, self.where, self.remedy))


class UsageError(DiagkitError):
    """An argument, an option or a combination of them makes no sense."""


class MissingDependency(DiagkitError):
    """A package, a compiler or a program that this one operation needs is not installed."""


class UnsupportedTorch(DiagkitError):
    """The installed torch is too old, or its internals are not the ones that diagkit knows."""


class SimulatorError(DiagkitError):
    """The simulated accelerator cannot be built or started here."""


class EngineError(DiagkitError):
    """An engine was asked for an operation that it does not have, or refuses in its present state."""


class TraceError(DiagkitError):
    """A path is no trace, or holds nothing that can be read."""


class MoveBlocked(DiagkitError):
    """A guard stopped a whole-model move that would have driven metadata and bytes apart."""


class RanksDisagree(DiagkitError):
    """The ranks of a job would do different things where all must do the same, so none did anything."""


def _plain(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return value if isinstance(value, str) else repr(value)


def _rebuild(
    kind: type[DiagkitError], what: str, found: object, expected: object, where: object, remedy: str | None
) -> DiagkitError:
    return kind(what, found=found, expected=expected, where=where, remedy=remedy)
