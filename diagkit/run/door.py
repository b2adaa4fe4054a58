"""Begins and ends the watch over a job: once per process, when FSDP2 makes its first group or an engine is made.

Before that nothing of diagkit's recording half is loaded: a process that never uses FSDP2 pays for one finder among
Python's own and, once FSDP2 is imported, for a trigger on one class. A child by ``fork`` is a process of its own, with
a watch of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from diagkit.run.arrivals import forget, when_imported

if TYPE_CHECKING:
    from diagkit.run.engines import EngineClass
    from diagkit.run.options import Options
    from diagkit.run.watch import Watch

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: Classes whose objects are engines, wherever they come from: verl's have one base.
ENGINES = ("verl.workers.engine.base:BaseEngine",)


_opened: list[Door] = []


def open_door(options: Options | None = None, explains: bool = False) -> Door | None:
    """Opens this process's one door; None where it is open already (`diagkit run` over a job that imports
    `diagkit.auto`). ``explains``: the first failure is explained on stderr. Without options those of the environment
    count, read when they are needed."""
    if _opened:
        return None
    door = Door(options, explains)
    _opened.append(door)
    door.open()
    return door


class Trigger:
    """Calls back once, when the first object of a class is made; then it is gone."""

    def __init__(self, cls: Any, callback: Callable[[], None]) -> None:
        self._cls = cls
        self._before = before = cls.__init__

        @functools.wraps(before)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            if self._cls is not None:
                callback()
            before(made, *args, **kwargs)

        self._cover = __init__
        cls.__init__ = __init__

    def leave(self) -> None:
        """Puts the identical constructor back where ours is on top; else it is inert from now on."""
        if self._cls is not None and vars(self._cls).get("__init__") is self._cover:
            self._cls.__init__ = self._before
        self._cls = None


class Door:
    """One process's watch, from the moment at which there is something to watch."""

    def __init__(self, options: Options | None, explains: bool = False) -> None:
        self.options = options
        self.watch: Watch | None = None
        self.fault = ""  # why this process is not watched
        self._explains = explains
        self._explained: set[int] = set()  # processes that have explained a failure: a child may, too
        self._trigger: Trigger | None = None
        self._hook: tuple[Any, Any] | None = None  # ours, and what it covers
        self._classes: list[EngineClass] = []
        self._waiting: list[Callable[[], None]] = []
        self._open = False
        self._hears_of_forks = False

    def open(self) -> None:
        """Waits for what is to be watched."""
        self._open = True
        self._wait(_FSDP2, self._set_trigger)
        more = os.environ.get("DIAGKIT_ENGINES", "").split(",") if self.options is None else self.options.engines
        for one in (*ENGINES, *more):
            module, _, name = one.strip().partition(":")
            if not (module and name):
                continue
            self._wait(module, functools.partial(self._engine_class, module, name))

    def close(self) -> None:
        """Takes everything out again and closes the trace. A second time is harmless."""
        self._open = False
        if self in _opened:
            _opened.remove(self)
        if self._hook is not None and sys.excepthook is self._hook[0]:
            sys.excepthook = self._hook[1]
        self._hook = None
        for callback in self._waiting:
            forget(callback)
        self._waiting.clear()
        for cls in self._classes:
            cls.leave()
        self._classes.clear()
        if self._trigger is not None:
            self._trigger.leave()
            self._trigger = None
        if self.watch is not None:
            self.watch.end()
            self.watch = None

    def _wait(self, module: str, callback: Callable[[], None]) -> None:
        shielded = functools.partial(self._safely, callback)
        self._waiting.append(shielded)
        when_imported(module, shielded)

    def _set_trigger(self) -> None:
        from diagkit import torch_internals

        if torch_internals.all_fsdp_modules():
            self._begin()
            return
        cls = getattr(sys.modules[_FSDP2], "FSDPParamGroup", None)
        if cls is not None:
            self._trigger = Trigger(cls, functools.partial(self._safely, self._begin))

    def _safely(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # a fault of ours: the job goes on, and hears of it once
            self.fault = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                warnings.warn(f"diagkit records nothing: {self.fault}. The job goes on.", RuntimeWarning, stacklevel=3)

    def _begin(self, forked: bool = False) -> None:
        if self._trigger is not None:
            self._trigger.leave()
            self._trigger = None
        if self.watch is not None or not self._open:
            return
        from diagkit.run.watch import Watch

        options = self._options()
        if options is None:
            self.close()
            return
        self.watch = Watch(options, self._failed)
        self.watch.begin(forked)
        if hasattr(os, "register_at_fork") and not self._hears_of_forks:
            # Not before hooks.py has done so: a child calls them in this order, and hooks.py forgets all listeners.
            self._hears_of_forks = True
            os.register_at_fork(after_in_child=self._forked)
        if self._explains and self._hook is None:
            self._cover_hook()

    def _options(self) -> Options | None:
        if self.options is not None:
            return self.options
        from diagkit.errors import UsageError
        from diagkit.run.options import Options

        try:
            self.options = Options.from_environment()
        except UsageError as error:  # a typing error in a job's environment must not end the job
            with contextlib.suppress(Exception):
                warnings.warn(f"diagkit records nothing: {error} The job goes on.", RuntimeWarning, stacklevel=2)
        return self.options

    def _engine_class(self, module: str, name: str) -> None:
        from diagkit.run.engines import EngineClass

        cls = EngineClass(module, name, self._made)
        with contextlib.suppress(AttributeError):  # no class of that name any more
            cls.arrived()
            self._classes.append(cls)

    def _made(self, engine: Any) -> None:
        self._safely(self._begin)
        if self.watch is not None:
            self.watch.engine(engine)

    def _failed(self, error: BaseException) -> None:
        """Explains the first failure of this process."""
        recorder = None if self.watch is None else self.watch.recorder
        if not self._explains or recorder is None or os.getpid() in self._explained:
            return
        from diagkit.run.ending import failure_text, say

        self._explained.add(os.getpid())
        say(failure_text(self.watch, error))

    def _cover_hook(self) -> None:
        before = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
            try:
                before(kind, error, traceback)
            finally:
                if self._open and not isinstance(error, KeyboardInterrupt):
                    with contextlib.suppress(Exception):
                        self._failed(error)

        self._hook = (show, before)
        sys.excepthook = show

    def _forked(self) -> None:
        # The parent's recorder belongs to the parent.
        if self._open and self.watch is not None and "torch" in sys.modules:
            self.watch = None
            self._safely(functools.partial(self._begin, forked=True))
