"""What is observed in PyTorch, and how it is put in and taken out.

One set of patches serves all recorders. An observed call goes to the original with the same arguments and its
result or exception comes back untouched; listeners are told before and after. To a listener that was told of an outer
call, inner observed calls are names noted in it, so that one cause has one moment; only a move that a job's own hook
makes inside a save or a load is told by itself, because the line to name is the hook's. Every listener is called
behind a shield: our faults end in its trace, never in the job.

`uninstall` puts the identical object back where ours is still on top. Where someone wrapped ours meanwhile, theirs
stays, ours becomes a plain pass-through inside it, and a later `install` wakes it instead of wrapping twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import gates
from diagkit.capture.cause import pass_through
from diagkit.capture.operations import APPLY, BUILD, PLACES, SHARD, STEP, Operation

__all__ = ["APPLY", "BUILD", "SHARD", "STEP", "Call", "Listener", "Operation", "add", "install", "remove", "uninstall"]


@dataclass(slots=True)
class Call:
    """One observed call under way in this thread."""

    operation: Operation
    subject: object  # what it was called on
    nested: dict[str, int] = field(default_factory=dict)  # observed calls inside, and how often
    told: tuple[Listener, ...] = ()  # who hears of it
    outer: Call | None = None
    inside: str = ""  # the observed call that runs in it just now
    frame: int = 0  # id of the frame that makes it
    raised: set[tuple[Any, ...]] = field(default_factory=set)  # failures of calls inside that were told by themselves

    def heard(self, inner: Operation) -> tuple[Listener, ...]:
        """Who hears of it, or of a call around it, and so need not hear of a call of ``inner`` in it."""
        told = () if self.outer is None else self.outer.heard(inner)
        if not self.operation.covers(inner):
            return told
        return (*told, *(listener for listener in self.told if listener not in told))

    def around(self) -> Iterator[Call]:
        """The calls around it, the nearest first."""
        call = self.outer
        while call is not None:
            yield call
            call = call.outer

    def note(self, inner: Operation, told: tuple[Listener, ...] = ()) -> None:
        """Notes an observed call inside this one, here and in the calls around; a module's call of the same method of
        its children is no other call. Who is ``told`` of it otherwise finds it noted nowhere, and so do all where one
        of them is not to hear of it."""
        name = inner.name
        for call in (self, *self.around()):
            if inner.full and not all(listener.full for listener in call.told):
                continue
            new = name in call.nested or len(call.nested) < 16
            if new and name not in (call.operation.name, call.inside) and not set(call.told) <= set(told):
                call.nested[name] = call.nested.get(name, 0) + 1
            told = (*told, *call.told)


class Listener(Protocol):
    """A recorder. ``full``: it wants to hear also of what only detail "full" tells."""

    @property
    def full(self) -> bool: ...

    def wants(self, operation: Operation, subject: object) -> bool: ...

    def before(self, call: Call) -> None: ...

    def after(self, call: Call) -> None: ...

    def failed(self, call: Call, error: BaseException) -> None: ...

    def registered(self, module: nn.Module) -> None: ...

    def trouble(self, where: str, error: BaseException) -> None: ...


_listeners: tuple[Listener, ...] = ()
_lock = threading.RLock()
_here = threading.local()
_modules = 0  # how many modules the job had imported when last looked


def _forked() -> None:
    # A child writes into no parent's trace, and must not wait for a lock that no thread of its own holds. Calls that
    # are under way in it tell nobody how they ended.
    global _listeners, _lock, _here
    call: Call | None = getattr(_here, "call", None)
    while call is not None:
        call.told, call = (), call.outer
    _listeners, _lock, _here = (), threading.RLock(), threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def add(listener: Listener) -> None:
    """Puts the patches in, if they are not, and tells the listener from now on."""
    global _listeners
    with _lock:
        if listener in _listeners and len(sys.modules) == _modules:
            return
        if listener not in _listeners:
            _listeners = (*_listeners, listener)
        install()


def remove(listener: Listener) -> None:
    """Tells the listener no more, and takes out what nobody else needs. A second time is harmless."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        uninstall()


def add_gate(gate: gates.Gate) -> None:
    """Asks this gate before each call of `Module._apply` from now on (see `gates`)."""
    with _lock:
        gates.add(gate)
        install()


def remove_gate(gate: gates.Gate) -> None:
    """Asks it no more, and takes out what nobody else needs. A second time is harmless."""
    with _lock:
        gates.remove(gate)
        uninstall()


def tell(listener: Listener, method: str, *args: Any) -> Any:
    """Calls a listener's method behind the shield; None where it failed."""
    try:
        return getattr(listener, method)(*args)
    except Exception as error:
        with contextlib.suppress(Exception):  # the trace itself may be gone: then there is nobody left to tell
            listener.trouble(f"{method} {args[0].operation.name if isinstance(args[0], Call) else ''}".strip(), error)
        return None


def _confess(where: str, error: Exception) -> None:
    """Tells every listener of a fault between the hooks and the listeners. Raises nothing."""
    for listener in _listeners:
        with contextlib.suppress(Exception):
            listener.trouble(where, error)


def under_way(listener: Listener) -> bool:
    """Whether an observed call runs in this thread of which the listener will tell."""
    call: Call | None = getattr(_here, "call", None)
    return call is not None and any(
        listener in one.told and one.operation.scope != "nothing" for one in (call, *call.around())
    )


# ---- the patches


class Patch:
    """One attribute of one class or module, replaced by a wrapper that tells the listeners."""

    def __init__(self, owner: Any, name: str, operation: Operation, quick: Callable[..., bool] | None = None) -> None:
        self.owner = owner
        self.name = name
        self.operation = operation
        self.original: Any = None
        self.wrapper: Any = None
        self.awake = False
        self._quick = quick  # true for calls that are not worth telling, asked first

    def put_in(self) -> None:
        current = vars(self.owner).get(self.name)
        if current is None:
            return
        ours = _original(current)
        if ours is not None:  # also one of an earlier time that came to light again when another tool went
            self.wrapper, self.original = current, ours
        elif self.wrapper is None or not _wraps(current, self.wrapper):
            self.original = current
            self.wrapper = self._wrap(current)
            _originals[self.wrapper] = current
            setattr(self.owner, self.name, self.wrapper)
        self.awake = True

    def take_out(self) -> None:
        self.awake = False
        if self.wrapper is not None and vars(self.owner).get(self.name) is self.wrapper:
            setattr(self.owner, self.name, self.original)
            self.wrapper = self.original = None

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        patch, operation, quick = self, self.operation, self._quick

        @internals.uncompiled
        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                untold = internals.compiling() or not patch.awake or (quick is not None and quick(*args))
                outer: Call | None = getattr(_here, "call", None)
                # A module's call on its children: everybody knows already. There are many, so this comes early.
                known = outer is not None and outer.operation is operation and len(outer.told) >= len(_listeners)
            except Exception as error:
                _confess(operation.name, error)
                untold = known = False
            way = original if untold or known else told
            if operation is APPLY and gates.standing and not untold:
                return gates.through(way, args, kwargs)
            return way(*args, **kwargs)

        def told(*args: Any, **kwargs: Any) -> Any:
            outer: Call | None = getattr(_here, "call", None)
            try:
                call = _begin(operation, args, outer)
            except Exception as error:
                call = None
                _confess(operation.name, error)
            if call is None and outer is None:
                return original(*args, **kwargs)
            before = "" if outer is None else outer.inside
            try:
                if outer is not None:
                    outer.inside = operation.name
                if call is not None:
                    call.frame = id(sys._getframe())
                _here.call = call or outer
                result = original(*args, **kwargs)
            except BaseException as error:
                if call is not None:
                    _here.call = outer
                    _tell_all(call, "failed", error)
                raise
            finally:
                _here.call = outer
                if outer is not None:
                    outer.inside = before
            if call is not None:
                _tell_all(call, "after")
            return result

        return observed


#: Every wrapper of ours that is left anywhere, and what it wraps.
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _tell_all(call: Call, method: str, *more: Any) -> None:
    for listener in call.told:
        tell(listener, method, call, *more)


def _original(wrapper: Any) -> Any:
    try:
        return _originals.get(wrapper)
    except TypeError:  # it cannot be referred to weakly, or not hashed: no wrapper of ours
        return None


def _begin(operation: Operation, args: tuple[Any, ...], outer: Call | None) -> Call | None:
    """The call, where a listener wants to hear of it that has not heard of one around it; of a move, of no move."""
    busy: tuple[Listener, ...] = ()
    if outer is not None:
        busy = outer.heard(operation)
        if len(busy) >= len(_listeners):
            outer.note(operation)
            return None
    call = Call(operation, args[0] if args else None, outer=outer)
    call.told = tuple(
        listener for listener in _listeners if listener not in busy and tell(listener, "wants", operation, call.subject)
    )
    if outer is not None:
        outer.note(operation, call.told)
    if not call.told:
        return None
    if len(sys.modules) != _modules:
        with contextlib.suppress(Exception):
            install()  # the job has imported more: perhaps a part that is observed, on its way to this very call
    _tell_all(call, "before")
    return call


def _wraps(outer: Any, inner: Any) -> bool:
    """Whether the object, a wrapper by convention, leads to the inner one; then its frames are no one's call."""
    codes = []
    for _ in range(20):
        codes.append(getattr(outer, "__code__", None))
        outer = getattr(outer, "__wrapped__", None)
        if outer is None:
            return False
        if outer is inner:
            pass_through.update(code for code in codes if code is not None)
            return True
    return False


_patches: dict[tuple[str, str, str], Patch] = {}
_handles: list[Any] = []


def _needed(operation: Operation) -> bool:
    gated = operation is APPLY and bool(gates.standing)
    return gated or any(listener.full or not operation.full for listener in _listeners)


def install() -> None:
    """Puts every patch in that somebody needs and whose module the job has imported. Safe when called again."""
    global _modules
    with _lock:
        _modules = len(sys.modules)
        for module_name, class_name, name, operation, quick in PLACES:
            owner: Any = internals.loaded(module_name)
            if owner is not None and class_name:
                owner = getattr(owner, class_name, None)
            if owner is None:
                continue
            patch = _patches.setdefault((module_name, class_name, name), Patch(owner, name, operation, quick))
            if not _needed(operation):
                continue
            try:
                patch.put_in()
            except Exception as error:
                _confess(f"observing {operation.name}", error)
        if _listeners and not _handles:
            from torch.nn.modules import module as modules
            from torch.optim import optimizer as optimizers

            _handles.append(optimizers.register_optimizer_step_post_hook(_stepped))
            for register in (
                modules.register_module_module_registration_hook,
                modules.register_module_parameter_registration_hook,
                modules.register_module_buffer_registration_hook,
            ):
                _handles.append(register(_registered))


def catch_up() -> None:
    """Puts the patches in that belong into what the job has imported since, if anybody listens."""
    if _listeners and len(sys.modules) != _modules:
        install()


def uninstall() -> None:
    """Takes every patch out that nobody needs and that is still on top, and sends those underneath others to sleep."""
    faults: list[Exception] = []
    with _lock:
        handles = [] if _listeners else _handles.copy()
        going = [patch.take_out for patch in _patches.values() if not _needed(patch.operation)]
        for undo in [*going, *(handle.remove for handle in handles)]:
            try:
                undo()
            except Exception as error:  # one that fails must not keep the others in
                faults.append(error)
        if handles:
            _handles.clear()
    if faults:
        raise faults[0]


@internals.uncompiled
def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if internals.compiling():
        return
    try:
        outer: Call | None = getattr(_here, "call", None)
        busy = () if outer is None else outer.heard(STEP)
        call = Call(STEP, optimizer)
        for listener in _listeners:
            if listener not in busy and tell(listener, "wants", STEP, optimizer):
                tell(listener, "after", call)
    except Exception as error:
        _confess(STEP.name, error)


@internals.uncompiled
def _registered(module: nn.Module, name: str, value: Any) -> None:
    if internals.compiling():
        return
    try:
        for listener in _listeners:
            tell(listener, "registered", module)
    except Exception as error:
        _confess("registration", error)
