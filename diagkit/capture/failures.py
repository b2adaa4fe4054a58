"""What is told of an exception: its type, its text, and who on its way takes a device from a parameter.

Read from code objects and source files alone; the exception's frames keep their locals to themselves.
"""

from __future__ import annotations

import inspect
import linecache
import re
from types import CodeType

from diagkit.capture.cause import kind_of, message_of, traceback_frames
from diagkit.trace.schema import Failure, Frame

#: The one text of which it matters who took a device from where.
_MIXED = re.compile(r"on the same device|at least two devices", re.IGNORECASE)
#: `next(model.parameters()).device` and its like; under an offload policy that is the CPU, where nothing is computed.
_ASKS = re.compile(r"\b(?:next|list)\(.{1,80}?\bparameters\(.{0,20}?\)\)*(?:\[\d\])*\s*\.device\b")


def failure_of(error: BaseException, operation: str) -> Failure:
    """The record of an exception that passed an observed call, a phase, or whoever asks."""
    message = message_of(error)
    return Failure(type(error).__name__, message, operation, _asks(error) if _MIXED.search(message) else "")


def _asks(error: BaseException) -> str:
    """The last line on the exception's way, in nobody else's code than the user's, that takes a device from a
    parameter; "" for none."""
    told = ""
    for code, line in traceback_frames(error.__traceback__):
        if kind_of(code.co_filename) == "user":
            told = _line(code, line) or told
    return told


def _line(code: CodeType, now: int) -> str:
    file, first = code.co_filename, code.co_firstlineno
    if file.startswith(("/dev/", "/proc/")):
        return ""  # a script that came through a pipe would be read from the job's own input
    lines = linecache.getlines(file)
    # Of a script's or a cell's own level, what ran before; of a function, all of it.
    its = lines[:now] if code.co_name == "<module>" else inspect.getblock(lines[first - 1 :])
    start = 1 if code.co_name == "<module>" else first
    found = [(start + n, text.strip()) for n, text in enumerate(its) if _ASKS.search(text)]
    if not found:
        return ""
    number, text = found[-1]
    return f"{Frame(file, number, code.co_name)}: {text[:200]}"
