"""A glance at a whole block of rows: has anything about them changed at all?

A signature holds, for every row of a block, all that a reading depends on, gathered by loops in C: a third of the
cost of reading row by row. Two equal signatures mean two equal readings; a block that is not of the common kind has
none and is read row by row. What it leaves out is what a storage that is still the same one does not change by
itself (`residency.py` says so too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from diagkit.capture.entries import Gradient, Slot, State
from diagkit.capture.facts import OptimizerWatch
from diagkit.trace.schema import GRADIENT, OPTIMIZER, OPTIMIZER_STATE, PARAMETER

Signature = tuple[Any, ...]
#: Rows looked at together: several passes over more than the processor's cache holds cost more than they save.
STRIDE = 32

_storage = torch._C.TensorBase.untyped_storage
_identity = attrgetter("_cdata")
_sharded_param = attrgetter("sharded_param")
_local = attrgetter("_local_tensor")
_flat = attrgetter("_sharded_param_data")
_state = attrgetter("sharded_state")
_device = attrgetter("device")
_dtype = attrgetter("dtype")
_wants_grad = attrgetter("requires_grad")
_grad = attrgetter("grad")


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
        list(map(_dtype, locals_)),
        list(map(_wants_grad, params)),
        list(map(id, params)),
        [id(slot.module()._parameters.get(slot.name)) for slot in slots],  # type: ignore[union-attr]
    )


def _gradients(entries: Sequence[Gradient]) -> Signature | None:
    params = [entry.slot.managed().sharded_param for entry in entries]  # type: ignore[misc,union-attr]
    return ("none",) if not any(grad is not None for grad in map(_grad, params)) else None


def any_gradient(slots: Sequence[Slot]) -> bool:
    """Whether one of the parameters in these slots has a gradient."""
    try:
        params = [slot.managed().sharded_param for slot in slots]  # type: ignore[misc,union-attr]
        return any(grad is not None for grad in map(_grad, params))
    except Exception:
        return any(Gradient(slot).tensor() is not None for slot in slots)


def _states(entries: Sequence[State]) -> Signature:
    # Nothing but FSDP2 exchanges what is under a DTensor, only of parameters; a moment that moves is another object.
    # So the object tells, at a fraction of the memory traffic, with the device, because an address may be used again;
    # plain counters are looked at themselves.
    values: list[torch.Tensor] = [entry.watch.state_of(entry.slot)[entry.part] for entry in entries]  # type: ignore[index]
    plain = [value for value in values if type(value) is torch.Tensor]
    return list(map(id, values)), list(map(_device, values)), list(map(_identity, map(_storage, plain)))


def _optimizers(watches: Sequence[OptimizerWatch]) -> Signature:
    return tuple(len(watch.optimizer().param_groups) for watch in watches)  # type: ignore[union-attr]


_LOOKS: dict[str, Callable[[Any], Signature | None]] = {
    PARAMETER: _parameters,
    GRADIENT: _gradients,
    OPTIMIZER_STATE: _states,
    OPTIMIZER: _optimizers,
}
