"""`guard`: no whole-model move of parameters that the offload policy keeps on the CPU.

How a move is recognised: `_apply` gets a function and says nothing of what it will do, so the function is tried on an
empty CPU tensor (no element, no byte; the parameters' dtype), and where the result is tells where parameters would go.
That holds for `to`, `cuda`, `npu`, `cpu`, `to_empty`, `type`, casts and a user's own function alike, and on a plug-in's
device, whose functions no list of closures would know. A function that fails on the empty tensor is let pass: it fails,
or does something else than moving. What `_apply` is not called for (single tensors, `load_state_dict`, optimizers) no
guard sees.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import hooks
from diagkit.capture.residency import quiet
from diagkit.errors import UsageError
from diagkit.remedy.moves import Kept, Move, move_others
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
    buffers stay, other parameters move, and the call returns the module as ever; ``"warn"``: the move goes on, with
    one `MoveWarning` for each line that moves. What does no harm passes: moves to the CPU, casts, `load_state_dict`,
    copies of single tensors, models without the policy. It is in force in all threads. Of several guards over one model
    the last one entered decides. All ranks must guard alike, or they part where one of them raises.

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
    """A guard in force; a context manager that closes it at its end. ``stopped`` counts the moves it met, by line."""

    def __init__(self, subject: object, on_move: str) -> None:
        self.on_move = on_move
        self.stopped: dict[str, int] = {}
        self._what = type(subject).__name__
        self._models = _weakly(subject)
        self._faults = 0
        self._gate = self._asked  # one object: a bound method is made anew at each look
        self.closed = False
        hooks.add_gate(self._gate)

    def close(self) -> None:
        """Guards no more. A second time is harmless."""
        if not self.closed:
            self.closed = True
            hooks.remove_gate(self._gate)

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"on_move={self.on_move!r}"
        told = "".join(f"\n  {line}" + (f" ×{n}" if n > 1 else "") for line, n in self.stopped.items())
        return f"<Guard of {self._what}, {state}>{told}"

    def _asked(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool | None:
        """The answer to one call of `_apply`: None for a stranger's, else whether it is not to run."""
        try:
            kept = self._kept()
            move = self._judged(module, fn, kept)
        except Exception as error:  # our own fault is no reason to stop a job
            self._confess(error)
            return False
        if not isinstance(move, Move):
            return move
        first = move.line not in self.stopped
        self.stopped[move.line] = self.stopped.get(move.line, 0) + 1
        if self.on_move == "raise":
            raise move.blocked()
        if self.on_move == "warn":
            if first:
                warnings.warn_explicit(str(move.blocked()), MoveWarning, move.file, move.number)
            return False
        move_others(module, fn, kept)
        return True

    def _judged(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], kept: Kept) -> Move | bool | None:
        """The harmful move that a call of `_apply` would be, False for a harmless one, None for a stranger's."""
        inside = {id(part) for _, part in internals.named_modules(module)}
        moved = list({id(entry.record): entry for (part, _), entry in kept.items() if part in inside}.values())
        if not moved:
            return None
        target = where_to(fn, moved[0])
        if target is None or target.type in ("cpu", "meta"):
            return False
        return Move.of(module, target, moved, inside)

    def _kept(self) -> Kept:
        """The parameters to watch over."""
        kept: Kept = {}
        for root in models_in(self._models()).values():
            for entry in offloaded(root):
                kept.update(((id(module), slot), entry) for module, slot in internals.param_slots(entry.record))
        return kept

    def _confess(self, error: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            with contextlib.suppress(Exception):
                warnings.warn(f"diagkit's guard could not judge a move: {type(error).__name__}: {error}", stacklevel=2)


def where_to(fn: Callable[[torch.Tensor], torch.Tensor], entry: Offloaded) -> torch.device | None:
    """The device to which a function given to `_apply` would bring an offloaded parameter; None: it cannot be told."""
    try:
        with quiet(), torch.no_grad():
            return fn(torch.empty(0, dtype=entry.record.sharded_param.dtype, device="cpu")).device
    except Exception:
        return None


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
