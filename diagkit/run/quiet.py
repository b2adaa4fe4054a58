"""Notices that a rank stands still, and writes down where.

A thread that sleeps; it looks at counters and, once per standstill, at the main thread's frames. It reads no tensor,
so it can do no harm whatever the main thread is in the middle of.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from diagkit.capture.recorder import Recorder


class QuietWatch(threading.Thread):
    """Tells the recorder when nothing was observed for ``seconds``."""

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        super().__init__(name="diagkit-quiet", daemon=True)
        self._recorder = recorder
        self._seconds = seconds
        self._done = threading.Event()
        self._main = threading.main_thread().ident

    def stop(self) -> None:
        """Ends it: gone when this returns, unless it is in the middle of writing a standstill down."""
        self._done.set()
        if self.is_alive():
            self.join(1.0)

    def run(self) -> None:
        """Looks a few times per limit."""
        seen, quiet, told = -1, 0.0, False
        pause = self._seconds / 4
        while not self._done.wait(pause):
            now = self._recorder.activity
            if now != seen:
                seen, quiet, told = now, 0.0, False
                continue
            quiet += pause
            if quiet >= self._seconds and not told:
                told = True
                with contextlib.suppress(Exception):
                    self._recorder.standstill(quiet, sys._current_frames().get(self._main or 0))
