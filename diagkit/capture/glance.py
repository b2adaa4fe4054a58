"""A glance at a whole block of rows: has anything about them changed at all?

A signature holds, for every row of a block, all that a reading depends on, gathered by loops in C: a third of the
cost of reading row by row. Two equal signatures mean two equal readings; a block that is not of the common kind has
none and is read row by row. What it leaves out is what a storage that is still the same one does not change by
itself (`residency.py` says so too).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from diagkit import torch_internals as internals
from diagkit.capture.entries import Gradient, Slot, State
from diagkit.capture.facts import GroupWatch, OptimizerWatch
from diagkit.trace.schema import GRADIENT, GROUP, OPTIMIZER, OPTIMIZER_STATE, PARAMETER

Signature = tuple[Any, ...]
#: Rows looked at together: several passes over more than the processor's cache holds cost more than they save.
STRIDE = 96

_storage = torch._C.TensorBase.untyped_storage
_index = torch._C.TensorBase.get_device
_identity = attrgetter("_cdata")
_sharded_param = attrgetter("sharded_param")
_local = attrgetter("_local_tensor")
_flat = attrgetter("_sharded_param_data")
_state = attrgetter("sharded_state")
_device = attrgetter("device")
_dtype = attrgetter("dtype")
_wants_grad = attrgetter("requires_grad")
_grad = attrgetter("grad")
_root = attrgetter("_is_root")
_training = attrgetter("_training_state")
_pending = attrgetter("_state_ctx.post_backward_final_callback_queued")


def glance(kind: str, entries: Sequence[Any]) -> Signature | None:
    """The signature of a block's entries now; None where the block has to be read row by row. Never raises."""
    look = _LOOKS.get(kind)
    try:
        return None if look is None else look(entries)
    except Exception:  # a parameter that FSDP2 does not manage, a model that is gone, a torch with other names
        return None


def _parameters(slots: Sequence[Slot]) -> Signature:
    records = [slot.managed() for slot in slots]  # type: ignore[misc]
    params = list(map(_sharded_param, records))
    locals_ = list(map(_local, params))
    return (
        list(map(_identity, map(_storage, locals_))),
        list(map(_identity, map(_storage, map(_flat, records)))),
        list(map(_state, records)),
        list(map(_device, params)),
        list(map(_dtype, params)),
        list(map(id, locals_)),
        list(map(_wants_grad, params)),
        list(map(id, params)),
        [id(slot.module()._parameters.get(slot.name)) for slot in slots],  # type: ignore[union-attr]
    )


def _gradients(entries: Sequence[Gradient]) -> Signature | None:
    return None if _any_gradient([entry.slot for entry in entries]) else ("none",)


def any_gradient(slots: Sequence[Slot]) -> bool:
    """Whether one of the parameters in these slots has a gradient."""
    try:
        return _any_gradient(slots)
    except Exception:
        return any(Gradient(slot).tensor() is not None for slot in slots)


def _any_gradient(slots: Sequence[Slot]) -> bool:
    params = map(_sharded_param, [slot.managed() for slot in slots])  # type: ignore[misc]
    return not {id(None)}.issuperset(map(id, map(_grad, params)))


def _states(entries: Sequence[State]) -> Signature | None:
    watch = entries[0].watch
    if not watch.looked:  # once a reading for all blocks of this optimizer
        held = _held(watch.optimizer())
        watch.changes += held is None or held != watch.held
        watch.held, watch.looked = held, True
    return None if watch.held is None else (watch.changes,)


def _held(optimizer: Any) -> Signature | None:
    # Nothing but FSDP2 exchanges what is under a DTensor, only of parameters; a moment that moves is another object.
    # So the object tells, at a fraction of the memory traffic, with the device's index (-1: the CPU), because `.data`
    # moves what stays the same object; plain counters are looked at themselves.
    values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
    try:
        devices = list(map(_index, values))
    except TypeError:  # not tensors alone; what is in a list may be exchanged without a trace in it
        if any(isinstance(value, (list, tuple, Mapping)) for value in values):
            return None
        values = [value for value in values if isinstance(value, torch.Tensor)]
        devices = list(map(_index, values))
    plain = [value for value in values if type(value) is torch.Tensor]
    ids = list(map(id, optimizer.state)), list(map(id, values))
    return *ids, devices, list(map(_identity, map(_storage, plain)))


def _groups(watches: Sequence[GroupWatch]) -> Signature | None:
    if not all(watch.initialised for watch in watches):
        return None
    states = [watch.state() for watch in watches]
    groups = [state if watch.group is None else watch.group() for watch, state in zip(watches, states, strict=True)]
    training, pending, running = list(map(_training, groups)), list(map(_pending, states)), internals.backward_running()
    if not running and (any(pending) or any(internals.enum_name(each) != "idle" for each in set(training))):
        return None  # perhaps a pass that was broken off, which is looked at twice
    sharded = [getattr(group, "_sharded_state", None) for group in groups]
    return sharded, training, pending, running, list(map(_root, states)), [watch.stale for watch in watches]


def _optimizers(watches: Sequence[OptimizerWatch]) -> Signature:
    return tuple(len(watch.optimizer().param_groups) for watch in watches)  # type: ignore[union-attr]


_LOOKS: dict[str, Callable[[Any], Signature | None]] = {
    PARAMETER: _parameters,
    GRADIENT: _gradients,
    OPTIMIZER_STATE: _states,
    GROUP: _groups,
    OPTIMIZER: _optimizers,
}
