"""Begins and ends the watch over a job: once per process, when FSDP2 or a known class of engines is imported.

Before that nothing of diagkit's recording half is loaded and nothing is patched: a process that never uses FSDP2 pays
for one finder among Python's own. A child by ``fork`` is a process of its own, with a watch of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diagkit.run.arrivals import forget, when_imported
from diagkit.run.options import Options

if TYPE_CHECKING:
    from diagkit.run.engines import EngineClass
    from diagkit.run.watch import Watch

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: Classes whose objects are engines, wherever they come from: verl's have one base.
ENGINES = ("verl.workers.engine.base:BaseEngine",)


class Door:
    """One process's watch, from the moment at which there is something to watch."""

    def __init__(self, options: Options, on_failure: Callable[[Watch, BaseException], None] | None = None) -> None:
        self.options = options
        self.watch: Watch | None = None
        self._on_failure = on_failure
        self._classes: list[EngineClass] = []
        self._waiting: list[Callable[[], None]] = []
        self._open = False

    def open(self) -> None:
        """Waits for what is to be watched."""
        self._open = True
        self._wait(_FSDP2, self._begin)
        for one in (*ENGINES, *self.options.engines):
            module, _, name = one.partition(":")
            self._wait(module, functools.partial(self._engine_class, module, name))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def close(self) -> None:
        """Takes everything out again and closes the trace. A second time is harmless."""
        self._open = False
        for callback in self._waiting:
            forget(callback)
        self._waiting.clear()
        for cls in self._classes:
            cls.leave()
        self._classes.clear()
        if self.watch is not None:
            self.watch.end()
            self.watch = None

    def _wait(self, module: str, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)
        when_imported(module, callback)

    def _begin(self) -> None:
        if self.watch is not None or not self._open:
            return
        from diagkit.run.watch import Watch

        self.watch = Watch(self.options, self._failed)
        self.watch.begin()

    def _engine_class(self, module: str, name: str) -> None:
        from diagkit.run.engines import EngineClass

        self._begin()
        cls = EngineClass(module, name, self._made)
        with contextlib.suppress(AttributeError):  # no class of that name any more
            cls.arrived()
            self._classes.append(cls)

    def _made(self, engine: Any) -> None:
        if self.watch is not None:
            self.watch.engine(engine)

    def _failed(self, error: BaseException) -> None:
        if self._on_failure is not None and self.watch is not None:
            self._on_failure(self.watch, error)

    def _forked(self) -> None:
        # The parent's recorder belongs to the parent.
        if self._open and self.watch is not None and "torch" in sys.modules:
            self.watch = None
            with contextlib.suppress(Exception):
                self._begin()
