"""`guard`: no whole-model move of parameters that the offload policy keeps on the CPU.

What a call of `_apply` would do is known beforehand where its function is one of PyTorch's own (`functions`): then all
is decided before anything moves. A function of the user's own is watched instead: each result of it is looked at before
`_apply` puts it into the module, so what is stopped is the first parameter under the policy, and what came before it in
the same call has gone. What `_apply` is not called for (single tensors, `load_state_dict`, optimizers) no guard sees.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import hooks
from diagkit.capture.gates import Function, parts
from diagkit.errors import UsageError
from diagkit.remedy.functions import abroad, is_torchs_own, tried
from diagkit.remedy.moves import Move, cast_all, move_others
from diagkit.remedy.offloaded import Offloaded, is_engine, models_in, offloaded
from diagkit.remedy.ready import check

__all__ = ["Guard", "MoveWarning", "guard"]

#: What a guard can do with a move.
MODES = ("raise", "skip", "warn")


class MoveWarning(UserWarning):
    """A move went on that drives metadata and bytes apart."""


def guard(model: object, on_move: str = "raise") -> Guard:
    """Stops moves of a model, or of any part of it, that `CPUOffloadPolicy` forbids, until it is closed.

    ``model`` is a module, several (by name or in a list), or an engine, whose models are looked for at each move.
    ``on_move``: ``"raise"`` a `MoveBlocked` before anything is moved; ``"skip"``: parameters under the policy and all
    buffers stay, other parameters move, a cast asked for in the same call is done to all, and the call returns the
    module as ever; ``"warn"``: the move goes on, with one `MoveWarning` for each line that moves. What does no harm
    passes: moves to the CPU, casts, `load_state_dict`, copies of single tensors, models without the policy. A function
    of your own given to `_apply` is stopped at the first parameter that it would move, and not before it was called.
    It is in force in all threads, and until it is closed: without ``with``, call `close()`; letting go of it ends
    nothing. Of several guards over one model the last one entered decides. All ranks must guard alike, or they part
    where one of them raises.

    Raises:
        UsageError: nothing to guard; an unknown ``on_move``; or it is too early, because the model is not sharded yet,
            still on meta, or on its way through an engine's initialisation, which moves it there and back rightly.

    Example::

        with dk.guard(engine):
            engine.save_checkpoint(path)  # a MoveBlocked names the line that would have split the parameters
    """
    if on_move not in MODES:
        raise UsageError("unknown on_move", found=on_move, expected=", ".join(MODES), remedy="Choose one of these")
    check(models_in(model), model)
    return Guard(model, on_move)


class Guard:
    """A guard in force; a context manager that closes it at the end of the outermost ``with``, and puts a closed one in
    force again. ``stopped`` counts the moves it met, by line."""

    def __init__(self, subject: object, on_move: str) -> None:
        self.on_move = on_move
        self.stopped: dict[str, int] = {}
        self._what = type(subject).__name__
        self._models = _weakly(subject)
        self._faults = 0
        self._gate = self._asked  # one object: a bound method is made anew at each look
        self._entered = 0
        self.closed = False
        hooks.add_gate(self._gate)

    def close(self) -> None:
        """Guards no more. A second time is harmless."""
        if not self.closed:
            self.closed = True
            hooks.remove_gate(self._gate)

    def __enter__(self) -> Guard:
        if self.closed:
            check(models_in(self._models()), self._models())
            self.closed = False
            hooks.add_gate(self._gate)
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered -= 1
        if self._entered <= 0:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"on_move={self.on_move!r}"
        told = "".join(f"\n  {line}" + (f" ×{n}" if n > 1 else "") for line, n in self.stopped.items())
        return f"<Guard of {self._what}, {state}>{told}"

    def _asked(self, module: nn.Module, fn: Function, recurse: bool) -> Function | bool | None:
        """The answer to one call of `_apply` (see `gates`)."""
        try:
            known = is_torchs_own(fn)
            result = tried(fn) if known else None
            if known and not abroad(result):
                return False
            moved = self._moved(module, recurse)
            if not moved:
                return None
            if result is None:
                return self._watched(module, fn, recurse, moved)
            move = Move.of(module, result.device, moved, recurse)
        except Exception as error:  # our own fault is no reason to stop a job
            self._confess(error)
            return False
        self._meet(move)
        if self.on_move == "warn":
            return False
        cast_all(module, fn, recurse)
        move_others(module, fn, recurse, _held(moved))
        return True

    def _moved(self, module: nn.Module, recurse: bool) -> list[Offloaded]:
        """The parameters to watch over that a call of the module's `_apply` reaches: FSDP2's slots, whatever is in them
        now, and any other slot that holds the same parameter."""
        roots = models_in(self._models()).values()
        slots: set[tuple[int, str]] = set()
        values: set[int] = set()
        sharded = False
        for part in parts(module, recurse):
            for slot, value in part._parameters.items():
                slots.add((id(part), slot))
                values.add(id(value))
                sharded = sharded or (value is not None and internals.local_tensor(value) is not None)
        if not sharded:  # a stranger's, or gathered just now
            own = {id(part) for root in roots for part in parts(root, True)}
            slots = {slot for slot in slots if slot[0] in own}

        def reached(record: Any) -> bool:
            return id(record.sharded_param) in values or any(
                (id(part), slot) in slots for part, slot in internals.param_slots(record)
            )

        if not slots:
            return []
        found = (entry for root in roots for entry in offloaded(root, reached))
        return list({id(entry.record): entry for entry in found}.values())

    def _meet(self, move: Move) -> None:
        """Counts a move, and raises or warns as the guard was told to."""
        first = move.line not in self.stopped
        self.stopped[move.line] = self.stopped.get(move.line, 0) + 1
        if self.on_move == "raise":
            raise move.blocked()
        if self.on_move == "warn" and first:
            warnings.warn_explicit(str(move.blocked()), MoveWarning, move.frame.file, move.frame.line)

    def _watched(self, module: nn.Module, fn: Function, recurse: bool, moved: list[Offloaded]) -> Function:
        """The function, held to what the guard allows; it is called as often, and with the same tensors, as ever."""
        parameters = {id(entry.record.sharded_param) for entry in moved}
        gradients = {id(entry.record.sharded_param.grad) for entry in moved}
        buffers = {id(buffer) for part in parts(module, recurse) for buffer in part._buffers.values()}
        met = False

        def watched(tensor: torch.Tensor) -> Any:
            nonlocal met
            result = fn(tensor)
            if not abroad(result) or tensor.device.type != "cpu":
                return result
            if id(tensor) in parameters and not met:
                try:
                    move = Move.of(module, result.device, moved, recurse)
                except Exception as error:  # our own fault is no reason to stop a job
                    self._confess(error)
                    return result
                met = True
                self._meet(move)
            stays = id(tensor) in parameters or (met and (id(tensor) in gradients or id(tensor) in buffers))
            return tensor.to(result.dtype) if stays and self.on_move == "skip" else result

        return watched

    def _confess(self, error: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            with contextlib.suppress(Exception):
                warnings.warn(f"diagkit's guard could not judge a move: {type(error).__name__}: {error}", stacklevel=2)


def _held(entries: Iterable[Offloaded]) -> Callable[[nn.Module, str], bool]:
    """Whether a module's slot holds one of these parameters."""
    slots = {(id(part), slot) for entry in entries for part, slot in internals.param_slots(entry.record)}
    values = {id(entry.record.sharded_param) for entry in entries}
    return lambda part, slot: (id(part), slot) in slots or id(part._parameters[slot]) in values


def _weakly(subject: object) -> Callable[[], Any]:
    """The subject without keeping its models alive: a function that gives what is left of it."""
    if is_engine(subject):
        try:
            engine = weakref.ref(subject)
        except TypeError:  # one that takes no weak reference
            return lambda: subject
        return lambda: engine() or ()
    models = {name: weakref.ref(model) for name, model in models_in(subject).items()}
    return lambda: {name: model for name, ref in models.items() if (model := ref()) is not None}
