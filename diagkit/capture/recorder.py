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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diagkit.capture import hooks
from diagkit.capture.cause import from_stack, from_traceback
from diagkit.capture.hooks import Call, Operation
from diagkit.capture.inventory import EVERYTHING, MODEL, STATES, Inventory
from diagkit.capture.process import describe
from diagkit.capture.residency import quiet, read
from diagkit.errors import UsageError
from diagkit.trace.schema import CALL, DETAILS, ENTER, EXIT, FAILURE, MARK, TENSOR_KINDS, Cause, Failure, Row
from diagkit.trace.writer import MemorySink, TraceWriter

_SCOPES: dict[str, frozenset[str]] = {
    "model": MODEL,
    "states": STATES,
    "everything": EVERYTHING,
    "nothing": frozenset(),
    "structure": frozenset(),
}
#: Groups and optimizers change by themselves as training goes on; only of tensors is it asked who moved them.
_TENSORS = frozenset(TENSOR_KINDS)
#: Faults of our own that are told; more would be the same ones again.
TROUBLES = 20


@dataclass(slots=True)
class _OpenPhase:
    ordinal: int
    name: str
    frame: int  # id of the frame that began it
    calls: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Watches models and optimizers of this process. Use it through `record`, or `close()` it yourself."""

    def __init__(self, writer: TraceWriter, detail: str = "transitions") -> None:
        self._writer = writer
        self._detail = detail
        self._lock = threading.RLock()
        self._phases: list[_OpenPhase] = []
        self._ordinal = 0
        self._told: int = 0  # id of the exception told last, so that it is told once on its way up
        self._troubles = 0
        self._pid = os.getpid()
        self._closed = False
        self._inventory = Inventory(self._define, writer.fact_id)

    # ---- what is watched

    def watch(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        engine: object | None = None,
    ) -> None:
        """Takes models (by label, where there are several), optimizers and an engine's flags in."""
        with self._guarded("watch"):
            for label, root in model.items() if isinstance(model, Mapping) else [("model", model)]:
                if root is not None:
                    self._inventory.add_model(root, label)
            for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ():
                self._inventory.add_optimizer(one)
            if engine is not None:
                self._inventory.add_engine(engine)

    @property
    def lines(self) -> list[bytes]:
        """The trace so far, where it is kept in memory; empty where it goes to a file."""
        return self._writer.lines

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        """One engine operation: what happens inside belongs to it. An exception is told and goes on its way."""
        caller = sys._getframe(2)
        opened = self._enter(name, label, caller)
        try:
            yield
        except BaseException as error:
            with self._guarded("failure"):
                self._fail(opened, error)
            raise
        finally:
            self._leave(opened)

    def mark(self, label: str) -> None:
        """A snapshot of everything now, under this label."""
        with self._guarded("mark"):
            self._moment(MARK, label, EVERYTHING)

    def exported(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Passes (name, tensor) pairs through one by one, reads where each tensor lives, keeps none."""
        readings: list[tuple[str, Any, Any, int]] = []
        try:
            for name, tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    with self._guarded("export"), quiet():
                        readings.append((name, tuple(tensor.shape), *read(tensor)))
                yield name, tensor
        finally:
            with self._guarded("export"):
                changes = self._inventory.exported(readings)
                self._write(CALL, f"export: {len(readings)} tensors", changes)

    def close(self, reason: str = "closed") -> None:
        """Ends the recording: patches out, a last snapshot, the trace closed. A second time is harmless."""
        if self._closed:
            return
        hooks.remove(self)
        with self._guarded("close"):
            for opened in reversed(self._phases):
                self._moment(EXIT, f"{opened.name}: cut", EVERYTHING, calls=opened.calls, phase=opened.ordinal)
            self._phases.clear()
            if self._ordinal or self._detail != "phases":
                self._moment(MARK, "end", EVERYTHING)
        self._closed = True
        self._writer.close(reason)

    def _enter(self, name: str, label: str, caller: Any) -> _OpenPhase:
        with self._lock:
            self._ordinal += 1
            parent = self._phases[-1].ordinal if self._phases else 0
            opened = _OpenPhase(self._ordinal, name, id(caller))
            self._phases.append(opened)
        with self._guarded("phase"):
            if self._detail != "phases":
                hooks.add(self)  # looks again at what the job has imported meanwhile
            begins = {"name": name, "parent": parent, "label": label}
            self._moment(ENTER, f"{name}: enter", EVERYTHING, begins=begins, phase=opened.ordinal)
        return opened

    def _leave(self, opened: _OpenPhase) -> None:
        with self._guarded("phase"):
            if opened in self._phases:
                self._moment(EXIT, f"{opened.name}: exit", EVERYTHING, calls=opened.calls, phase=opened.ordinal)
        with self._lock:
            if opened in self._phases:
                self._phases.remove(opened)
            if not self._phases:
                self._told = 0

    def _fail(self, opened: _OpenPhase, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            return
        again = self._told == id(error)
        self._told = id(error)
        if not again:
            cause = from_traceback(opened.name, error.__traceback__)
            failure = Failure(type(error).__name__, str(error), opened.name)
            self._moment(
                FAILURE,
                f"{opened.name}: {type(error).__name__}",
                EVERYTHING,
                cause=cause,
                failure=failure,
                phase=opened.ordinal,
            )

    # ---- observed calls (the Listener of hooks.py)

    def wants(self, operation: Operation, subject: object) -> bool:
        """Whether a call is worth a moment: on a watched module, or on anything that is no module."""
        if self._closed or os.getpid() != self._pid:
            return False
        if isinstance(subject, nn.Module):
            return self._inventory.watches(subject)
        return True

    def before(self, call: Call) -> None:
        """Takes in what changed since the last moment, so that this call is not blamed for it."""
        if call.operation.notable:
            with self._lock:
                changes = self._read(_SCOPES[call.operation.scope] & _TENSORS)
                if changes:
                    self._write(MARK, f"before {call.operation.name}", changes)

    def after(self, call: Call) -> None:
        """Tells what the call changed."""
        with self._lock:
            operation = call.operation
            self._count(operation.name)
            for name in call.nested:
                self._count(name)
            if operation.scope == "structure":
                self._inventory.dirty = True
                return
            if operation.scope == "states" and operation is not hooks.STEP:
                self._inventory.forget_states()
            changes = self._read(_SCOPES[operation.scope], stepped=operation is hooks.STEP)
            if changes or operation.notable:
                target = self._inventory.module_name(call.subject) if call.subject is not None else ""
                cause = from_stack(operation.name, call.nested, target, self._base())
                self._write(CALL, self._label(cause, operation), changes, cause=cause)

    def failed(self, call: Call, error: BaseException) -> None:
        """Tells what the call had changed when it raised."""
        with self._lock:
            self._count(call.operation.name)
            self._told = id(error)
            target = self._inventory.module_name(call.subject) if call.subject is not None else ""
            cause = from_stack(call.operation.name, call.nested, target, self._base())
            failure = Failure(type(error).__name__, str(error), (call.nested or [call.operation.name])[-1])
            self._moment(
                FAILURE, f"{call.operation.name}: {type(error).__name__}", EVERYTHING, cause=cause, failure=failure
            )

    def registered(self, module: nn.Module) -> None:
        """A module, parameter or buffer was registered somewhere."""
        if self._inventory.watches(module):
            self._inventory.dirty = True

    def trouble(self, where: str, error: BaseException) -> None:
        """Tells a fault of our own."""
        with self._lock:
            self._troubles += 1
            if self._troubles <= TROUBLES:
                self._writer.trouble(where, f"{type(error).__name__}: {error}", self._now())

    # ---- writing

    def _define(self, rows: list[Row], local_shapes: list[tuple[int, ...] | None]) -> None:
        self._writer.table(rows, local_shapes, self._now())

    def _read(self, kinds: frozenset[str], stepped: bool = False, afresh: bool = False) -> list[Any]:
        if self._inventory.dirty:
            self._inventory.look_again()
        if stepped and not self._inventory.new_states():
            return []  # a step changes no residency but by the states that it makes the first time
        return self._inventory.scan(kinds, afresh)

    def _moment(self, kind: str, label: str, kinds: frozenset[str], **more: Any) -> None:
        with self._lock:
            afresh = kind in (MARK, FAILURE) or self._writer.wants_key()
            self._write(kind, label, self._read(kinds, afresh=afresh), **more)

    def _write(self, kind: str, label: str, changes: list[Any], phase: int | None = None, **more: Any) -> None:
        key = self._writer.wants_key()
        if key:
            # Exchanges since the last moment must not be lost in a whole state.
            exchanged = {
                row
                for change in changes
                if change.exchanged
                for row in range(change.start, change.start + change.count)
            }
            changes = self._inventory.state(exchanged)
        self._writer.moment(kind, label, self._now() if phase is None else phase, changes, key=key, **more)

    def _now(self) -> int:
        return self._phases[-1].ordinal if self._phases else 0

    def _base(self) -> int:
        return self._phases[-1].frame if self._phases else 0

    def _count(self, name: str) -> None:
        if self._phases:
            calls = self._phases[-1].calls
            calls[name] = calls.get(name, 0) + 1

    @staticmethod
    def _label(cause: Cause, operation: Operation) -> str:
        """``Module.to`` where that is how `_apply` was reached."""
        if operation is not hooks.APPLY:
            return operation.name
        return next((name for name in reversed(cause.chain) if name.startswith("Module.")), operation.name)

    @contextlib.contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """Our own faults end here, told in the trace. An interrupt of the user's does not."""
        try:
            with self._lock:
                yield
        except Exception as error:
            with contextlib.suppress(Exception):
                self.trouble(where, error)


def start(
    model: nn.Module | Mapping[str, nn.Module] | None,
    optimizer: Any = None,
    *,
    out: str | os.PathLike[str] | None,
    detail: str = "transitions",
    engine: object | None = None,
    run: str | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Recorder:
    """A recorder at work; ``out=None`` keeps the trace in memory.

    Raises:
        UsageError: unknown detail, or nothing to watch.
        TraceError: the folder cannot be written, or holds a trace already.
    """
    if detail not in DETAILS:
        raise UsageError("unknown detail", found=detail, expected=", ".join(DETAILS), remedy="Choose one of these")
    header = describe(detail, run, job)
    writer = TraceWriter(MemorySink(), header) if out is None else TraceWriter.create(out, header, overwrite=overwrite)
    recorder = Recorder(writer, detail)
    recorder.watch(model, optimizer, engine)
    if detail != "phases":
        hooks.add(recorder)
    recorder.mark("start")
    return recorder
