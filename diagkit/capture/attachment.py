"""Watches a real engine's own operations: each one a phase, from outside, its code unchanged.

Only this one object is touched. Its methods are covered by entries in the instance's own dictionary; where that
cannot be (slots, properties), its class is exchanged for a subclass without a name or state of its own. `detach`
takes both away again, and what someone else put over ours in the meantime stays, with ours inert beneath it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from diagkit.capture.begin import start
from diagkit.capture.follow import Phase, Watch, followed
from diagkit.capture.parts import models_of, optimizers_of
from diagkit.capture.recorder import Recorder
from diagkit.errors import TraceError, UsageError
from diagkit.trace.reader import RankTrace, read_file, read_rank

#: Operation -> phase, by the names of verl's engines and of plain trainers.
OPERATIONS: Mapping[str, str] = {
    "initialize": "init",
    "init_model": "init",
    "setup": "init",
    "save": "save",
    "save_checkpoint": "save",
    "save_model": "save",
    "load": "load",
    "load_checkpoint": "load",
    "resume": "load",
    "export": "export",
    "get_per_tensor_param": "export",
    "get_per_tensor_param_shard": "export",
    "get_per_tensor_param_delta_shard": "export",
    "train": "train",
    "train_batch": "train",
    "train_step": "train",
    "training_step": "train",
    "train_mode": "train",
    "fit": "train",
    "forward_backward_batch": "train",
    "optimizer_step": "train",
    "infer_batch": "eval",
    "eval_batch": "eval",
    "evaluate": "eval",
    "eval_mode": "eval",
    "to": "move",
}
#: Contexts whose block is the operation, not the call that makes them.
_CONTEXTS = ("train_mode", "eval_mode")
_MISSING = object()


def attach(
    engine: Any,
    *,
    out: str | os.PathLike[str] | None = None,
    operations: Mapping[str, str] | None = None,
    label: str = "model",
    detail: str = "transitions",
    recorder: Recorder | Callable[[], Recorder | None] | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_failure: Callable[[BaseException], None] | None = None,
    values: Iterable[str] = (),
) -> Attachment:
    """Records each of an engine's own operations as a phase, until ``.detach()``.

    The engine is any object with some of the methods of `OPERATIONS`; ``operations`` names others,
    ``{"dump": "save"}``. Its models and optimizers are found by themselves, also those that it makes later. Without
    ``out`` the trace stays in memory (``.trace``); ``recorder`` joins one that is already at work (or a function
    that gives it, once it has begun), and ``label`` tells the engine's model apart there. ``values`` as for `record`.

    Raises:
        UsageError: no operation to watch, or a name in ``operations`` that the engine does not have.
        TraceError: as for `record`.

    Example::

        attached = dk.attach(engine, out="runs/a")
        engine.save_checkpoint(path)
        attached.detach()
        print(attached.trace.findings())
    """
    names = _names(engine, operations)
    own = recorder is None
    if recorder is None:
        recorder = start(None, out=out, detail=detail, job=job, overwrite=overwrite, values=values)
    return Attachment(engine, recorder, names, label, own, on_failure)


def _names(engine: Any, operations: Mapping[str, str] | None) -> dict[str, str]:
    for name in operations or ():
        if inspect.getattr_static(engine, name, None) is None:
            raise UsageError("the engine has no such operation", found=name, where=type(engine).__name__)
    names = {
        name: phase
        for name, phase in OPERATIONS.items()
        if callable(static := inspect.getattr_static(engine, name, None)) or isinstance(static, property)
        # A module's `train(mode)` is a switch, no training.
        if not (isinstance(engine, nn.Module) and static is nn.Module.train)
    }
    names.update(operations or {})
    if not names:
        raise UsageError(
            "nothing to attach to",
            found=type(engine).__name__,
            expected="an object with a method such as save_checkpoint, load_checkpoint, export, train or to",
            remedy='Name its operations: operations={"dump": "save"}',
        )
    return names


class Attachment:
    """One engine that is watched; a context manager that detaches at its end."""

    def __init__(
        self,
        engine: Any,
        recorder: Recorder | Callable[[], Recorder | None],
        names: Mapping[str, str],
        label: str,
        own: bool,
        on_failure: Callable[[BaseException], None] | None,
    ) -> None:
        self.engine = engine
        self._given = recorder
        self.working = 0  # operations under way
        self.operations = dict(names)
        self.attached = True
        self.label = label
        self._own = own
        self._on_failure = on_failure
        self._covers: dict[str, tuple[_Cover, Any]] = {}
        self._class: type | None = None
        self._cover()
        self._look()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, None where it has not begun yet."""
        if isinstance(self._given, Recorder):
            return self._given
        try:
            return self._given()
        except Exception:  # whoever gives it tells of its own faults
            return None

    @property
    def trace(self) -> RankTrace:
        """This rank's trace so far.

        Raises:
            TraceError: nothing was recorded yet.
        """
        recorder = self.recorder
        if recorder is None:
            raise TraceError("nothing was recorded yet", where=type(self.engine).__name__)
        return read_rank(recorder.lines) if recorder.path is None else read_file(recorder.path)

    def detach(self) -> None:
        """Gives the engine its own methods back, and ends the recording where it was begun here. Again: harmless."""
        if not self.attached:
            return
        self.attached = False
        held = vars(self.engine) if hasattr(self.engine, "__dict__") else {}
        for name, (cover, before) in self._covers.items():
            if held.get(name) is not cover:
                continue  # someone wrapped it meanwhile: theirs stays
            if before is _MISSING:
                del held[name]
            else:
                held[name] = before
        if self._class is not None and type(self.engine) is self._class:
            self.engine.__class__ = self._class.__mro__[1]
        self._covers.clear()
        if self._own and isinstance(self._given, Recorder):
            self._given.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached to" if self.attached else "detached from"
        return f"<Attachment {state} {type(self.engine).__name__}: {', '.join(self.operations)}>"

    # ---- covering

    def _cover(self) -> None:
        cls = type(self.engine)
        beyond: dict[str, str] = {}
        for name, phase in self.operations.items():
            on_class = inspect.getattr_static(cls, name, None)
            if not hasattr(self.engine, "__dict__") or hasattr(type(on_class), "__set__"):
                beyond[name] = phase
                continue
            held = vars(self.engine)
            cover = _Cover(self, name, phase, getattr(self.engine, name))
            self._covers[name] = (cover, held.get(name, _MISSING))
            held[name] = cover
        if beyond:
            self._exchange_class(cls, beyond)

    def _exchange_class(self, cls: type, names: Mapping[str, str]) -> None:
        """A subclass that differs in these methods alone: what a property or slots leave open."""
        body: dict[str, Any] = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        for name, phase in names.items():
            body[name] = property(self._getter(cls, name, phase))
        try:
            self._class = type(cls)(cls.__name__, (cls,), body)
            self.engine.__class__ = self._class
        except TypeError as error:
            self._class = None
            self._trouble(f"attaching to {', '.join(names)}", error)

    def _getter(self, cls: type, name: str, phase: str) -> Callable[[Any], Any]:
        def covered(engine: Any) -> Any:
            value = getattr(super(self._class or cls, engine), name)
            return _Cover(self, name, phase, value) if callable(value) else value

        return covered

    # ---- at each operation

    def run(self, cover: _Cover, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operation of the engine as a phase."""
        recorder = self.recorder
        if recorder is None:
            return cover.original(*args, **kwargs)
        name = cover.operation
        label = f"{type(self.engine).__name__}.{name}"
        watch = functools.partial(self._exported, recorder)
        if name in _CONTEXTS or inspect.iscoroutinefunction(cover.original):
            block = functools.partial(recorder.phase, cover.phase, label)
            result = cover.original(*args, **kwargs)
            return self._followed(result, block, watch, contexts=name in _CONTEXTS)
        self._look()
        self.working += 1
        try:
            with recorder.phase(cover.phase, label):
                try:
                    result = cover.original(*args, **kwargs)
                finally:
                    self._look()
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self.working -= 1
        handed = functools.partial(recorder.phase, cover.phase, f"{label}: consumed")
        return self._followed(result, handed, watch, contexts=False)

    def _followed(self, result: Any, phase: Phase, watch: Watch, contexts: bool) -> Any:
        try:
            return followed(result, phase, watch, contexts)
        except Exception as error:  # a type whose copy cannot be made: the engine's own result is what counts
            self._trouble("following a result", error)
            return result

    def _exported(self, recorder: Recorder, tensors: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from recorder.exported(tensors, self.label)
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        if self._on_failure is not None and not isinstance(error, GeneratorExit):
            with contextlib.suppress(Exception):
                self._on_failure(error)

    def _look(self) -> None:
        """Takes in what the engine holds by now."""
        recorder = self.recorder
        if recorder is None:
            return
        try:
            models = models_of(self.engine)
            names = {self.label: next(iter(models.values()))} if len(models) == 1 else models
            recorder.watch(names, optimizers_of(self.engine), self.engine, self.label)
        except Exception as error:
            self._trouble("looking at the engine", error)

    def _trouble(self, where: str, error: Exception) -> None:
        recorder = self.recorder
        if recorder is not None:
            recorder.trouble(where, error)


class _Cover:
    """Stands in the place of one of an engine's methods."""

    def __init__(self, attachment: Attachment, operation: str, phase: str, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.attachment = attachment
        self.operation = operation
        self.phase = phase
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attachment.attached:
            return self.original(*args, **kwargs)
        return self.attachment.run(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<watched {self.original!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the engine is another engine: it gets the method, not our cover.
        return getattr, (self.attachment.engine, self.operation)
