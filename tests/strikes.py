"""Lets something happen at every point of diagkit's code at which Python looks for signals, one point a run.

CPython runs a signal's handler where a function begins, where a call has returned and where a loop goes round. A
trace function sees each of these points pass and raises a real signal at the chosen one.
"""

from __future__ import annotations

import dis
import functools
import inspect
import pathlib
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import diagkit
from diagkit.capture import Recorder, record

HERE = str(pathlib.Path(diagkit.__file__).parent)
LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
#: Where no code can defend itself: whoever is to close what was begun has been called, and has not begun.
DOORS = (inspect.unwrap(record).__code__, Recorder.close.__code__)


@functools.cache
def looked_at(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which Python has just looked for signals."""
    found: set[int] = set()
    before = "RESUME"  # up to Python 3.10 the beginning has no instruction of its own
    for instruction in dis.get_instructions(code):
        if before.startswith(LOOKS):
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)


class Strike:
    """Raises ``signum`` once inside the block, at the point with this number, counted from 0 by first passing."""

    def __init__(self, point: int, signum: int) -> None:
        self.place = ""  # where it struck
        self._point = point
        self._signum = signum
        self._passed: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> Strike:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    @property
    def passed(self) -> int:
        """How many points the block came by."""
        return len(self._passed)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HERE) or frame.f_code in DOORS:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "opcode":
            code = frame.f_code
            key = (code, frame.f_lasti)
            if frame.f_lasti in looked_at(code) and key not in self._passed:
                self._passed.add(key)
                if len(self._passed) == self._point + 1:
                    self.place = f"{pathlib.Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                    sys.settrace(None)
                    signal.raise_signal(self._signum)
        return self._inside
