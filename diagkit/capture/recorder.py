"""Records phases, snapshots and transitions of one process into a trace.

The rules: nothing watched is moved, synchronised, kept or changed; no exception of ours reaches the job; nothing
stays behind when closed. A moment is written at the edges of phases, at each observed call that is notable or
changed something, and at each failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from diagkit.capture import hooks, taps
from diagkit.capture.cause import from_stack, from_traceback, marks_of, message_of
from diagkit.capture.copies import Copies
from diagkit.capture.failures import failure_of
from diagkit.capture.handed import Exports
from diagkit.capture.hooks import Call
from diagkit.capture.inventory import EVERYTHING, MODEL, STATES
from diagkit.capture.ledger import Ledger
from diagkit.capture.operations import APPLY, BACKWARD, LOOKS, STEP, Operation
from diagkit.capture.phases import OpenPhase, Phases
from diagkit.capture.subjects import subject_name
from diagkit.trace.schema import (
    CALL,
    ENTER,
    EXIT,
    FAILURE,
    GRADIENT,
    GROUP,
    MARK,
    TENSOR_KINDS,
    Cause,
    Change,
)
from diagkit.trace.writer import TraceWriter

_SCOPES: dict[str, frozenset[str]] = {
    "model": MODEL,
    "states": STATES,
    "everything": EVERYTHING,
    "nothing": frozenset(),
    "structure": frozenset(),
    "groups": frozenset((GROUP,)),
}
#: Groups and optimizers change by themselves as training goes on; only of tensors is it asked who moved them.
_TENSORS = frozenset(TENSOR_KINDS)
_SHOWN = _TENSORS - {GRADIENT}  # what a state dict can hold


class Recorder:
    """Watches models and optimizers of this process. Use it through `record`, or `close()` it yourself."""

    def __init__(
        self,
        writer: TraceWriter,
        detail: str = "transitions",
        wants: Callable[[str], bool] = lambda name: True,
        probed: frozenset[str] = frozenset(),
    ) -> None:
        self._detail = detail
        self.full = detail == "full"
        self._backward: Cause | None = None  # the backward pass under way
        self._lock = threading.RLock()
        self._phases = Phases()
        self._ledger = Ledger(writer, wants, self._phases)
        self._ledger.inventory.readings.probed = probed
        self._exports = Exports(self._ledger, self.full)
        self._copies = Copies(self._ledger, self._exports, self._phases, self._copy_cause)
        self._told: tuple[Any, ...] = ()  # marks of the exception told last, so that it is told once on its way up
        self._failed_last = ("", "")  # type and message of the failure told last
        self.activity = 0  # observed calls and phases so far: a sign of life
        self._pid = os.getpid()
        self._closed = False

    # ---- what is watched

    def watch(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: Any = None,
        engine: object | None = None,
        label: str | None = None,
    ) -> None:
        """Takes models (by label, where there are several), optimizers and an engine's flags in. ``label`` is that of
        the engine's model, by default the first one's."""
        self._safely("watch", self._watch, model, optimizer, engine, label)

    def _watch(self, model: Any, optimizer: Any, engine: object | None, label_of_engine: str | None) -> None:
        for label, root in model.items() if isinstance(model, Mapping) else [("model", model)]:
            if root is not None:
                self._ledger.inventory.add_model(root, label)
        for one in [optimizer] if hasattr(optimizer, "param_groups") else optimizer or ():
            self._ledger.inventory.add_optimizer(one)
        if engine is not None:
            self._ledger.inventory.add_engine(engine, label_of_engine)

    def observe(self) -> None:
        """Puts the hooks in, also into what the job has imported since. Only recorders of calls need it."""
        self._safely("observe", hooks.add, self)
        if self.full:
            self._safely("observe", taps.add, self)

    def watches(self, module: nn.Module) -> bool:
        """Whether the module belongs to a watched model."""
        return self._ledger.inventory.watches(module)

    @property
    def path(self) -> Path | None:
        """The trace's file, None where it goes to none."""
        return self._ledger.writer.path

    @property
    def lines(self) -> list[bytes]:
        """The trace so far, where it is kept in memory; empty where it goes to a file."""
        return self._ledger.writer.lines

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        """One engine operation: what happens inside belongs to it. An exception is told and goes on its way."""
        opened = self._safely("phase", self._enter, name, label, sys._getframe(2))
        try:
            yield
        except BaseException as error:
            if opened is not None:
                self._safely("failure", self._fail, opened, error)
            raise
        finally:
            if opened is not None:
                self._safely("phase", self._leave, opened)

    def mark(self, label: str) -> None:
        """A snapshot of everything now, under this label."""
        self._safely("mark", self._ledger.moment, MARK, label, EVERYTHING)

    def exported(self, tensors: Iterable[tuple[str, Any]], label: str | None = None) -> Iterator[tuple[str, Any]]:
        """Passes (name, tensor) pairs of the model with this label (default: the first) through one by one, reads
        where each tensor lives, keeps none."""
        export = self._safely("export", self._exports.begin, label)
        try:
            for pair in tensors:
                self._safely("export", self._exports.look, export, pair)
                box = [pair]
                del pair
                yield box.pop()  # so that the consumer alone decides how long it lives
        finally:
            self._safely("export", self._exports.end, export)

    def failed_outside(self, error: BaseException) -> None:
        """Tells an exception that ends the job, unless it was told last."""
        self._safely("failure", self._fail_outside, error)

    def _fail_outside(self, error: BaseException) -> None:
        if self._failed_last != (type(error).__name__, message_of(error)):
            self._tell_failure("", self._phases.current.ordinal, error)

    def standstill(self, seconds: float, frame: FrameType | None) -> None:
        """Tells that nothing was observed for so long, and where the thread with this innermost frame is."""
        self._safely("standstill", self._standstill, seconds, frame)

    def _standstill(self, seconds: float, frame: FrameType | None) -> None:
        cause = from_stack("", (), "", self._phases.current.frame, frame) if frame is not None else Cause("")
        self._ledger.writer.standstill(seconds, str(cause).removesuffix(" -> "), self._phases.current.ordinal)

    def close(self, reason: str = "closed") -> None:
        """Ends the recording: patches out, a last snapshot, the trace closed. A second time is harmless."""
        try:
            self._close(reason)
        except BaseException:  # an interrupt by hand: nobody closes again what it cut short
            self._close(reason)
            raise

    def _close(self, reason: str) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._shielded("close", taps.remove, self)
            self._shielded("close", hooks.remove, self)  # also for a signal's handler in the middle of a reading
        self._safely("close", self._end)
        self._safely("close", self._shut, reason)

    def _end(self) -> None:
        for opened in self._phases.cut():
            self._ledger.moment(EXIT, f"{opened.name}: cut", EVERYTHING, calls=opened.calls, phase=opened.ordinal)
        if self._phases.count or self._detail != "phases":
            self._ledger.moment(MARK, "end", EVERYTHING)

    def _shut(self, reason: str) -> None:
        self._ledger.writer.close(reason)
        self._closed = True  # last, so that an interrupt before it leaves it to be done again

    def _enter(self, name: str, label: str, caller: FrameType) -> OpenPhase:
        self.activity += 1
        opened = self._phases.begin(name, caller)
        self._ledger.inventory.trainer = self._ledger.inventory.trainer or threading.get_ident()
        try:
            if self._detail != "phases":
                self._shielded("observe", hooks.add, self)
            begins = {"name": name, "parent": opened.parent, "label": label}
            more = {"begins": begins, "phase": opened.ordinal}
            self._shielded("phase", self._ledger.moment, ENTER, f"{name}: enter", EVERYTHING, **more)
        except BaseException:  # an interrupt by hand: the block never runs, and nobody leaves the phase
            self._leave(opened)
            raise
        return opened

    def _leave(self, opened: OpenPhase) -> None:
        try:
            if opened in self._phases:
                more: dict[str, Any] = {"calls": opened.calls, "phase": opened.ordinal}
                self._ledger.moment(EXIT, f"{opened.name}: exit", EVERYTHING, **more)
        finally:
            self._phases.end(opened)
            if not self._phases.current.ordinal:
                self._told = ()

    def _fail(self, opened: OpenPhase, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            return
        again = self._told == marks_of(error)
        self._told = marks_of(error)
        if not again:
            self._tell_failure(opened.name, opened.ordinal, error)

    def _tell_failure(self, name: str, phase: int, error: BaseException) -> None:
        self._exports.tell()
        cause = from_traceback(name, error.__traceback__)
        failure = failure_of(error, name)
        self._failed_last = (failure.type, failure.message)
        label = f"{name}: {failure.type}" if name else failure.type
        self._ledger.moment(FAILURE, label, EVERYTHING, cause=cause, failure=failure, phase=phase)

    # ---- observed calls (the Listener of hooks.py)

    def wants(self, operation: Operation, subject: object) -> bool:
        """Whether a call is about what is watched."""
        self.activity += 1
        if self._deaf() or (operation.full and not self.full):
            return False
        with self._lock:
            concerned = self._ledger.inventory.concerns(subject)
        return concerned  # not from inside: an interrupt on the way out would leave the lock locked

    def before(self, call: Call) -> None:
        """Takes in what changed since the last moment, so that this call is not blamed for it."""
        if call.operation is BACKWARD:
            self._backward = self._cause(call)
        self._ledger.inventory.gathered.due()
        if call.operation.renews:
            with self._lock:
                self._exports.due()
        if call.operation.notable:
            with self._lock:
                if self._ledger.read(_SCOPES[call.operation.scope] & (_SHOWN if call.operation.looks else _TENSORS)):
                    outer = next((outer for outer in call.around() if self in outer.told), None)
                    if outer is None:
                        self._ledger.write(MARK, f"before {call.operation.name}")
                    else:  # what the call around it has changed by now
                        self._ledger.write(CALL, outer.operation.name, cause=self._cause(outer))

    def after(self, call: Call) -> None:
        """Tells what the call changed."""
        with self._lock:
            operation = call.operation
            if operation is BACKWARD:
                self._backward = None
            if operation is STEP:
                self._ledger.inventory.trainer = threading.get_ident()
            self._phases.note(operation.name)
            for name, times in call.nested.items():
                self._phases.note(name, times)
            if operation.scope == "structure":
                self._ledger.inventory.dirty = True
                return
            if not operation.full and operation is not STEP:
                self._ledger.inventory.gathered.sharded()
            if operation.scope == "states" and operation is not STEP:
                self._ledger.inventory.forget_states()
            if operation.looks and LOOKS.issuperset(call.nested):
                changes: list[Change] = []  # `before` has just read it all
            else:
                changes = self._ledger.read(_SCOPES[operation.scope], stepped=operation is STEP)
            if self._exports.overtaken(operation) or changes or operation.notable:
                cause = self._cause(call)
                self._ledger.write(CALL, self._label(cause, operation), cause=cause)

    def failed(self, call: Call, error: BaseException) -> None:
        """Tells what the call had changed when it raised."""
        with self._lock:
            if call.operation is BACKWARD:
                self._backward = None
            self._phases.note(call.operation.name)
            self._told = marks_of(error)
            if (id(self), *self._told) in call.raised:
                return  # told of the call inside, with the line that made it
            self._exports.tell()
            for outer in call.around():
                outer.raised.add((id(self), *self._told))
            cause = self._cause(call)
            failure = failure_of(error, [call.operation.name, *call.nested][-1])
            self._failed_last = (failure.type, failure.message)
            self._ledger.moment(
                FAILURE, f"{call.operation.name}: {type(error).__name__}", EVERYTHING, cause=cause, failure=failure
            )

    def copied(self, name: str, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """A tensor was copied to another device (the Watcher of taps.py)."""
        self._safely("copy", self._copies.copied, name, source, target, non_blocking)

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor is about to be read."""
        self._safely("read", self._copies.read, name, tensor)

    def waited(self) -> None:
        """Something waited for the device."""
        self._safely("wait", self._copies.waited)

    def registered(self, module: nn.Module) -> None:
        """A module, parameter or buffer was registered somewhere."""
        if self._ledger.inventory.watches(module):
            self._ledger.inventory.dirty = True

    def trouble(self, where: str, error: BaseException) -> None:
        """Tells a fault of our own."""
        if os.getpid() == self._pid:  # in a forked child the lock may be held for ever
            with self._lock:
                self._ledger.trouble(where, error)

    # ---- words

    def _cause(self, call: Call) -> Cause:
        try:
            target = "" if call.subject is None else subject_name(self._ledger.inventory.models, call.subject)
            frame: FrameType | None = sys._getframe()
            while frame is not None and id(frame) != call.frame:
                frame = frame.f_back  # inside the call there may be another, whose line is not this one's
            cause = from_stack(call.operation.name, call.nested, target, self._phases.current.frame, frame)
            if cause.frame is None and self._backward is not None:  # autograd has threads of its own for a device
                around = self._backward
                return replace(cause, chain=(*around.chain, *cause.chain), frame=around.frame, stack=around.stack)
            return cause
        except Exception as error:  # what moved is worth telling without who moved it
            self.trouble("cause", error)
            return Cause(call.operation.name)

    def _copy_cause(self, name: str, target: str, request: str) -> Cause | None:
        if hooks.under_way(self):
            return None
        return replace(self._cause(Call(Operation(name, "nothing"), None)), target=target, request=request)

    @staticmethod
    def _label(cause: Cause, operation: Operation) -> str:
        """``Module.to`` where that is how `_apply` was reached."""
        if operation is not APPLY:
            return operation.name
        return next((name for name in reversed(cause.chain) if name.startswith("Module.")), operation.name)

    def _safely(self, where: str, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """What the method returns; None where it failed (told in the trace), and where nothing is heard.
        Our own faults end here. An interrupt of the user's does not."""
        return None if self._deaf() else self._shielded(where, method, *args, **more)

    def _shielded(self, where: str, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            with self._lock:
                result = method(*args, **more)
            return result
        except Exception as error:
            with contextlib.suppress(Exception):
                self.trouble(where, error)
        return None

    def _deaf(self) -> bool:
        """Whether nothing is heard: after closing, in a forked child, and while this very thread is at work here. Then
        a signal's handler runs in between (one that saves a checkpoint, say), and half a reading is no state to read
        on from: what the handler moves, the next reading finds."""
        return self._closed or os.getpid() != self._pid or self._lock._is_owned()  # type: ignore[attr-defined]
