"""Turns frames into a cause: which line of whose code, through which calls.

Frames are read by their code objects alone. Their locals are never touched: until Python 3.13 reading them keeps
every local alive for as long as the frame runs.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from diagkit.trace.schema import Cause, Frame

#: Frames looked at, and frames kept, at most.
DEPTH = 400
KEPT = 24

_TORCH = tuple(
    # A device's plug-in (torch_npu) carries calls on as torch does, and is nobody's own code either.
    os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), name) + os.sep
    for name in ("torch", "torch_npu")
)
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), name)
    for name in ("capture" + os.sep, "remedy" + os.sep, "run" + os.sep, "live.py", "auto.py", "cli.py", "__main__.py")
)
_STDLIB = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_SITE = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
_MACHINERY = tuple(
    site + name + os.sep
    for site in _SITE
    for name in ("IPython", "ipykernel", "traitlets", "tornado", "_pytest", "pluggy", "ipyparallel")
)
#: Where the methods of nn.Module are defined, also those that a plug-in adds as plain functions.
_MODULE_FILES = (os.path.join("nn", "modules", "module.py"), os.path.join("torch_npu", "utils", "_module.py"))
_kinds: dict[str, str] = {}
#: Causes made lately: a training loop calls from the same lines again and again.
MEMORY = 64
_known: dict[tuple[Any, ...], tuple[Cause, list[CodeType]]] = {}
#: Other tools' wrappers around what is observed: whoever called what they wrap is the one to name. So it is with a
#: module's own `_apply`, which PyTorch calls.
pass_through: set[CodeType] = set()


def kind_of(file: str) -> str:
    """ "torch", "ours" (diagkit's observers), "machinery" (interpreter, standard library, kernel), or "user"."""
    known = _kinds.get(file)
    if known is None:
        path = os.path.abspath(file) if not file.startswith("<") else file
        if path.startswith(_TORCH):
            known = "torch"
        elif path.startswith(_OURS):
            known = "ours"
        elif (
            path.startswith(_MACHINERY)
            or path.startswith("<frozen")
            or (path.startswith(_STDLIB) and not path.startswith(_SITE))
        ):
            known = "machinery"
        else:
            known = "user"
        _kinds[file] = known
    return known


def from_stack(operation: str, nested: Iterable[str], target: str, base: int, frame: FrameType | None = None) -> Cause:
    """The cause of an observed call on the stack now, or on another thread's (its innermost ``frame``). ``base``: id of
    the frame that began the phase, 0 for none."""
    frame = frame or sys._getframe(1)
    found: list[tuple[CodeType, int, bool]] = []
    inside = True
    for _ in range(DEPTH):
        if frame is None:
            break
        if id(frame) == base:
            inside = False
        found.append((frame.f_code, frame.f_lineno, inside))
        frame = frame.f_back
    key = (operation, tuple(nested), target, base != 0, *((id(code), line, inside) for code, line, inside in found))
    known = _known.get(key)
    if known is None:
        found.reverse()
        if len(_known) >= MEMORY:
            _known.clear()
        # The codes are kept with it, so that their ids stay theirs.
        known = _known[key] = (_cause(operation, nested, target, found, base != 0), [code for code, _, _ in found])
    return known[0]


def from_traceback(operation: str, traceback: TracebackType | None, target: str = "") -> Cause:
    """The cause of an exception that reached a phase (the ``operation``): its traceback, the frames of the phase itself
    and of the code that began it left out of the chain."""
    found = [(code, line, n > 1) for n, (code, line) in enumerate(traceback_frames(traceback))]
    return replace(_cause("", [], target, found, known_base=True), operation=operation)


def traceback_frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    """Code and line of each frame that an exception passed through, outermost first."""
    for _ in range(DEPTH):
        if traceback is None:
            return
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _cause(
    operation: str, nested: Iterable[str], target: str, found: list[tuple[CodeType, int, bool]], known_base: bool
) -> Cause:
    """``found``: code, line and whether inside the phase, outermost first."""
    stack: list[Frame] = []
    chain: list[str] = []
    culprit: tuple[CodeType, int] | None = None
    torch_calls: list[str] = []
    for n, (code, line, inside) in enumerate(found):
        kind = kind_of(code.co_filename)
        if kind == "user":
            if culprit is not None and (code in pass_through or code.co_name == "_apply"):
                stack.append(_frame(code, line))
                continue
            if culprit is None or not _carries_on(code, found[n + 1 : n + 2]):
                culprit = (code, line)
            torch_calls = []
            if code.co_name != "<module>" and (inside or not known_base):
                chain.append(_name(code))
            stack.append(_frame(code, line))
        elif kind == "torch" and not _plumbing(code.co_name):
            torch_calls.append(_name(code))
    calls = [call for n, call in enumerate(torch_calls) if call not in torch_calls[:n]]
    # `Module.to` says more than the `_apply` that it calls; a bare `_apply` is named itself.
    last = [] if calls and operation.endswith("._apply") else [operation]
    full = [
        *chain[-12:],
        *calls[:6],
        *(name for name in last if name and name not in calls),
        *(name for name in nested if not name.endswith("._apply")),
    ]
    return Cause(
        operation=operation,
        chain=tuple(full),
        frame=None if culprit is None else _frame(*culprit),
        stack=tuple(stack[-KEPT:]),
        target=target,
    )


def message_of(error: BaseException) -> str:
    """An exception's text. One that carries tensors would print them, which reads their bytes: then only what it is."""
    if _holds_tensor(error.args):
        return "(a message with tensors in it)"
    try:
        return str(error)
    except Exception as again:
        return f"(its message cannot be had: {type(again).__name__})"


def marks_of(error: BaseException) -> tuple[Any, ...]:
    """What tells an exception from another without keeping it: an address alone is soon used again."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = () if last is None else (id(last.tb_frame.f_code), last.tb_lasti)
    return (id(error), type(error).__name__, *where)


def _holds_tensor(value: object, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return len(value) > 1000 or any(_holds_tensor(item, depth - 1) for item in value)
    return False


def _carries_on(code: CodeType, after: list[tuple[CodeType, int, bool]]) -> bool:
    """Whether this is a model's own ``to`` that ends in that of nn.Module, as every transformers model has one: the
    line to name is the one that called it."""
    return code.co_varnames[:1] == ("self",) and any(
        c.co_name == code.co_name and c.co_filename.endswith(_MODULE_FILES) for c, _, _ in after
    )


def _plumbing(name: str) -> bool:
    """Functions of torch that carry a call on and say nothing to its user: private ones and decorators' wrappers."""
    return (name.startswith(("_", "<")) and not name.startswith("__")) or name in (
        "inner",
        "wrapper",
        "wrapped",
        "decorate_context",
    )


def _frame(code: CodeType, line: int) -> Frame:
    file = code.co_filename
    # A script that came through a pipe (`python /dev/stdin`) would be read a second time, from the job's own input.
    text = "" if file.startswith(("/dev/", "/proc/")) else linecache.getline(file, line).strip()[:200]
    return Frame(file, line, _name(code), text)


def _name(code: CodeType) -> str:
    name: str = getattr(code, "co_qualname", None) or searched_name(code)  # co_qualname: Python 3.11
    name = name.rpartition("<locals>.")[2]
    if name == "wrap_module_to":  # what `torch.utils.generate_methods_for_privateuse1_backend` makes
        name = torch._C._get_privateuse1_backend_name()
    elif "." in name or not code.co_filename.endswith(_MODULE_FILES):
        return name
    return f"Module.{name}"


@functools.lru_cache(maxsize=1024)
def searched_name(code: CodeType) -> str:
    """``"FSDPEngine.save_checkpoint"``, found among the classes of the module that the code comes from; for Python
    3.10, whose code objects do not know it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) != code.co_filename:
            continue
        for cls in [value for value in vars(module).values() if isinstance(value, type)]:
            for function in vars(cls).values():
                function = inspect.unwrap(getattr(function, "__func__", function))
                if getattr(function, "__code__", None) is code:
                    return f"{cls.__qualname__}.{code.co_name}"
    return code.co_name
