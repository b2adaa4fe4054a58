"""Runs somebody else's script or module as Python itself would: its ``__main__``, its ``sys.argv``, its path, its end.

Whatever it raises goes on its way: exit codes, signals and the interpreter's own last words stay as they are. Only our
frames are taken from the traceback that the user sees.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from diagkit.errors import UsageError

_HOME = os.path.dirname(os.path.dirname(__file__))
_OBSERVERS = tuple(os.path.join(_HOME, room) + os.sep for room in ("capture", "run"))


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be run: the module that it will be, and how to get its code."""

    module: types.ModuleType
    compiled: Callable[[], types.CodeType]


def script_program(path: str) -> Program:
    """A script.

    Raises:
        UsageError: it cannot be read.
    """
    full = os.path.abspath(path)
    if os.path.isdir(full):
        raise UsageError("cannot run a folder", found=path, remedy="Name a script, or -m PACKAGE.MODULE")
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        raise UsageError("cannot read the script", found=error.strerror or error, where=path) from None
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=full, __builtins__=builtins, __cached__=None)
    module.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", full)
    return Program(module, lambda: compile(source, full, "exec", dont_inherit=True))


def module_program(name: str) -> Program:
    """A module found on the path; of a package, its ``__main__``.

    Raises:
        UsageError: there is no such module, or it has no code.
    """
    spec = _spec(name)
    if spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    get_code: Callable[[str], types.CodeType] | None = getattr(spec.loader, "get_code", None)
    if get_code is None or spec.origin is None:
        raise UsageError("this module has no code to run", found=name)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=spec.origin,
        __builtins__=builtins,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return Program(module, lambda: get_code(spec.name))


def _spec(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError("cannot find the module", found=name, where=str(error)) from None
    if spec is None or spec.loader is None:
        raise UsageError("cannot find the module", found=name, expected="one on the Python path")
    return spec


def set_the_stage(path_entry: str | None, argv: Sequence[str]) -> None:
    """``sys.argv`` and the first entry of ``sys.path`` as the script expects them."""
    sys.argv[:] = argv
    if path_entry is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0:1] = [path_entry]


def execute(program: Program, ended: Callable[[BaseException | None], None]) -> None:
    """Runs it as ``__main__``; ``ended`` hears of the exception after its traceback was printed, or of a good end."""
    sys.modules["__main__"] = program.module
    code = None
    try:
        code = program.compiled()
        exec(code, program.module.__dict__)
    except SystemExit as leaving:
        ended(leaving)
        raise
    except BaseException:
        _strip_when_shown(code, ended)
        raise
    ended(None)


def _without_ours(error: BaseException | None) -> None:
    """Takes the frames of our observers out of a traceback, and of those of the exceptions that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        while error.__traceback__ is not None and _ours(error.__traceback__):
            error.__traceback__ = error.__traceback__.tb_next
        at = error.__traceback__
        while at is not None:
            while at.tb_next is not None and _ours(at.tb_next):
                at.tb_next = at.tb_next.tb_next
            at = at.tb_next
        error = error.__cause__ or error.__context__


def _ours(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename.startswith(_OBSERVERS)


def _strip_when_shown(code: types.CodeType | None, ended: Callable[[BaseException | None], None]) -> None:
    """Has whatever hook the script chose show the traceback from the script's own first frame on."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        inner = traceback
        while inner is not None and inner.tb_frame.f_code is not code:
            inner = inner.tb_next
        # Without a frame of the script's it was a syntax error of its own, which Python shows without a frame.
        error.__traceback__ = inner
        _without_ours(error)
        try:
            hook(kind, error, inner)
        finally:
            ended(error)

    sys.excepthook = show
