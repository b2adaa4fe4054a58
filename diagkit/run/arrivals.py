"""Calls back when the job has imported a module, and imports nothing itself.

The finder stands first among Python's own, finds no module by itself, and leaves when all that was waited for is
there. A fault in a callback never reaches the import.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[], None]
_waiting: dict[str, list[Callback]] = {}
_here = threading.local()


def when_imported(name: str, callback: Callback) -> None:
    """Calls ``callback()`` once the module is there: now, if it is."""
    module = sys.modules.get(name)
    if module is not None and not _half_made(module):
        callback()
        return
    _waiting.setdefault(name, []).append(callback)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget(callback: Callback) -> None:
    """Waits for it no more."""
    for name, callbacks in list(_waiting.items()):
        callbacks[:] = [other for other in callbacks if other != callback]
        if not callbacks:
            del _waiting[name]
    _leave_if_done()


def _half_made(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _leave_if_done() -> None:
    if not _waiting:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(_FINDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Asks the other finders, and has what they find call back when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting or getattr(_here, "asking", "") == fullname:
            return None
        _here.asking = fullname
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec = find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        _call_back_after(spec.loader, fullname)
                    return spec  # type: ignore[no-any-return]
        finally:
            _here.asking = ""
        return None


def _call_back_after(loader: Any, name: str) -> None:
    """Covers this one loader's ``exec_module``; the cover is gone when it returns."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):
            del loader.exec_module
        execute(module)
        callbacks = _waiting.pop(name, [])
        _leave_if_done()
        for callback in callbacks:
            with contextlib.suppress(Exception):
                callback()

    with contextlib.suppress(AttributeError):  # a loader that takes no attributes: the module arrives unnoticed
        loader.exec_module = exec_module


_FINDER = _Finder()
