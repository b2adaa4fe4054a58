"""What is observed of single tensors, for recorders of detail "full" alone: copies, what waits for them, what reads.

Methods and functions that Python code calls, covered while somebody listens; no dispatch mode, because one that is
entered in one place and left in another would take a user's own mode off the stack in its stead. So a copy that an
operator makes by itself is not seen, and neither is a read by an operator that is not listed here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from diagkit import torch_internals as internals
from diagkit.capture.hooks import Patch
from diagkit.capture.operations import Operation
from diagkit.capture.residency import quiet

COPIES = ("to", "cpu", "copy_")
READS = ("item", "tolist", "numpy", "__array__", "clone", "sum", "isnan", "isfinite")
#: Functions to which a tensor, or a container of tensors, is given to be read.
READERS = {
    "torch": ("save", "equal", "allclose"),
    "torch.distributed": ("broadcast", "all_reduce", "send", "isend", "all_gather_into_tensor"),
}
#: Of the device's module: what waits for copies. Streams and events wait in methods of C, which cannot be covered: who
#: asks for one is taken to wait.
WAITS = ("synchronize", "current_stream", "default_stream", "stream")
_METHODS = ("__new__", "synchronize", "query", "record", "record_event", "wait_stream")


class Watcher(Protocol):
    """Who hears of it."""

    def copied(self, name: str, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None: ...

    def read(self, name: str, tensor: torch.Tensor) -> None: ...

    def waited(self) -> None: ...

    def trouble(self, where: str, error: BaseException) -> None: ...


_watchers: tuple[Watcher, ...] = ()
_lock = threading.RLock()
_here = threading.local()
_taps: dict[tuple[int, str], Tap] = {}  # by owner and name


def _forked() -> None:
    # A child writes into no parent's trace, and must not wait for a lock that no thread of its own holds.
    global _watchers, _lock, _here
    _watchers, _lock, _here = (), threading.RLock(), threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def add(watcher: Watcher) -> None:
    """Covers what is not, and tells the watcher from now on. A second time is harmless."""
    global _watchers
    with _lock:
        if watcher not in _watchers:
            _watchers = (*_watchers, watcher)
        for tap in _all():  # anew each time: a device may have come since
            _taps.setdefault((id(tap.owner), tap.name), tap).put_in()


def remove(watcher: Watcher) -> None:
    """Tells the watcher no more; the last one to go uncovers all. A second time is harmless."""
    global _watchers
    with _lock:
        _watchers = tuple(other for other in _watchers if other is not watcher)
        if _watchers:
            return
        faults: list[Exception] = []
        for tap in _taps.values():
            try:
                tap.take_out()
            except Exception as error:  # one that fails must not keep the others in
                faults.append(error)
    if faults:
        raise faults[0]


def _all() -> Iterator[Tap]:
    device, _ = internals.accelerator()
    module = getattr(torch, device, None)
    for name in (*COPIES, *([device] if device != "cpu" and hasattr(torch.Tensor, device) else ())):
        yield Tap(torch.Tensor, name, "copy")
    for name in READS:
        yield Tap(torch.Tensor, name, "read")
    for place, names in READERS.items():
        for name in names:
            if (owner := internals.loaded(place)) is not None and hasattr(owner, name):
                yield Tap(owner, name, "read")
    for owner in (module, getattr(torch, "accelerator", None)) if device != "cpu" else ():
        for name in WAITS:
            if callable(getattr(owner, name, None)):
                yield Tap(owner, name, "wait")
    for cls in (getattr(module, "Stream", None), getattr(module, "Event", None)) if device != "cpu" else ():
        for name in _METHODS:
            if isinstance(cls, type) and name in vars(cls):
                yield Tap(cls, name, "wait")


class Tap(Patch):
    """One function that is covered; an inherited one is put on its class for as long."""

    def __init__(self, owner: Any, name: str, role: str) -> None:
        super().__init__(owner, name, Operation(f"{getattr(owner, '__name__', '')}.{name}", "nothing", full=True))
        self.role = role
        self._inherited: Any = None

    def put_in(self) -> None:
        if self.name not in vars(self.owner):
            self._inherited = getattr(self.owner, self.name)
            setattr(self.owner, self.name, self._inherited)
        super().put_in()

    def take_out(self) -> None:
        super().take_out()
        if self._inherited is not None and vars(self.owner).get(self.name) is self._inherited:
            delattr(self.owner, self.name)
            self._inherited = None

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            # A graph that is being traced must not see us, and what one of these calls inside is part of it.
            if torch.compiler.is_compiling() or not tap.awake or getattr(_here, "busy", False):
                return original(*args, **kwargs)
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("diagkit.capture"):  # the probe of values copies
                return original(*args, **kwargs)
            _here.busy = True
            try:
                tap._tell(tap._before, args, kwargs)
                result = original(*args, **kwargs)
                tap._tell(tap._after, args, kwargs, result)
            finally:
                _here.busy = False
            return result

        return observed

    def _tell(self, method: Callable[..., None], *args: Any) -> None:
        try:
            with quiet():
                method(*args)
        except Exception as error:
            for watcher in _watchers:
                with contextlib.suppress(Exception):
                    watcher.trouble(self.operation.name, error)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.role == "wait" or not args:
            return
        taken = args[1:2] if self.name == "copy_" else args[:1] if self.owner is torch.Tensor else args
        for tensor in _tensors(taken):
            for watcher in _watchers:
                watcher.read(self.operation.name, tensor)

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        waits = self.role == "wait"
        if self.role == "copy" and isinstance(result, torch.Tensor) and args:
            source = args[1] if self.name == "copy_" and len(args) > 1 else args[0]
            if isinstance(source, torch.Tensor) and source.device.type != result.device.type:
                non_blocking = bool(kwargs.get("non_blocking", next((a for a in args if isinstance(a, bool)), False)))
                for watcher in _watchers:
                    watcher.copied(self.operation.name, source, result, non_blocking)
                waits = not non_blocking and result.device.type == "cpu"
        elif self.name in ("item", "tolist") and isinstance(args[0], torch.Tensor):
            waits = args[0].device.type != "cpu"
        for watcher in _watchers if waits else ():
            watcher.waited()


def _tensors(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member, depth - 1)
    elif depth and isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member, depth - 1)
