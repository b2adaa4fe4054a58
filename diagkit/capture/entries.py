"""What stands behind a row of tensors: how to find the tensor now, and how to read it.

Each entry has ``tensor()``, the tensor or None, and ``read(known, storage)``, its key and storage given those of
the last reading. Entries keep nothing alive: modules, FSDP2's records and optimizers are weakly held, tensors not
at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.facts import OptimizerWatch, nowhere
from diagkit.capture.residency import NO_STORAGE, SHAPE_AGREES, UNWRITTEN, Key, read, read_managed

#: Key and storage of a tensor that is not there.
GONE: tuple[None, int] = (None, NO_STORAGE)
Reading = tuple[Key | None, int]


class Slot:
    """One place in a module that holds a parameter."""

    __slots__ = ("managed", "module", "name", "sharded", "tie")

    def __init__(self, module: weakref.ref[nn.Module], name: str, record: Any | None, tie: bool) -> None:
        self.module: Callable[[], nn.Module | None] = module
        self.name = name
        self.managed = None if record is None else weakref.ref(record)  # FSDP2's record of the parameter
        self.tie = tie  # an earlier slot holds the same tensor
        self.sharded = internals.sharded()

    def become(self, other: Slot) -> None:
        """The place has been looked at anew: FSDP2 may manage it now."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def leave(self) -> None:
        """The model has no such place any more."""
        self.module, self.managed = nowhere, None

    def tensor(self) -> torch.Tensor | None:
        """FSDP2's sharded parameter (also while the slot holds the gathered one), or what the slot holds."""
        record = None if self.managed is None else self.managed()
        if record is not None:
            return record.sharded_param  # type: ignore[no-any-return]
        module = self.module()
        held = None if module is None else module._parameters.get(self.name)
        return held if isinstance(held, torch.Tensor) else None  # anything can be put there

    def read(self, known: Key | None, storage: int) -> Reading:
        module = self.module()
        if module is None:
            return GONE
        held = module._parameters.get(self.name)
        record = None if self.managed is None else self.managed()
        if record is None:
            if held is None:
                return GONE
            key, storage = read(held, None, known, storage)
            return ((*key, "tie"), storage) if self.tie else (key, storage)
        if self.tie:
            if record.sharded_state is self.sharded and held is not record.sharded_param:
                if held is None:
                    return GONE
                key, storage = read(held)
                return (*key, "apart"), storage
            key, storage = read_managed(record.sharded_param, record, held, self.sharded, known, storage)
            return (*key, "tie"), storage
        return read_managed(record.sharded_param, record, held, self.sharded, known, storage)


class Buffer:
    """One place in a module that holds a buffer."""

    __slots__ = ("_given", "module", "name", "tie", "unwritten")

    def __init__(self, module: weakref.ref[nn.Module], name: str, tie: bool) -> None:
        self.module: Callable[[], nn.Module | None] = module
        self.name = name
        self.tie = tie
        self.unwritten = False  # it was on meta, and nothing has been written into the bytes that it got
        self._given = 0  # id of the tensor that it was then

    def become(self, other: Buffer) -> None:
        """The place has been looked at anew."""
        self.module, self.name, self.tie = other.module, other.name, other.tie

    def leave(self) -> None:
        """The model has no such place any more."""
        self.module = nowhere

    def tensor(self) -> torch.Tensor | None:
        held = self._held()
        return held if isinstance(held, torch.Tensor) else None

    def _held(self) -> Any:
        module = self.module()
        return None if module is None else module._buffers.get(self.name)

    def read(self, known: Key | None, storage: int) -> Reading:
        tensor = self._held()
        if tensor is None:
            return GONE
        key, storage = read(tensor, None, known, storage)
        if tensor.is_meta:
            self.unwritten, self._given = True, 0
        elif self.unwritten:
            self._given = self._given or id(tensor)
            # Another tensor brings values of its own; another storage in the same one (`.data`) may be a mere move.
            self.unwritten = self._given == id(tensor) and not internals.was_written(tensor)
        if self.unwritten and not tensor.is_meta:
            key = (*key, UNWRITTEN)
        return ((*key, "tie"), storage) if self.tie else (key, storage)


class Gradient:
    """The gradient of a parameter."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def tensor(self) -> torch.Tensor | None:
        tensor = self.slot.tensor()
        # `.grad` of a tensor that is no leaf warns the user.
        return tensor.grad if tensor is not None and tensor.is_leaf else None

    def read(self, known: Key | None, storage: int) -> Reading:
        grad = self.tensor()
        return GONE if grad is None else read(grad, _like(self.slot.tensor(), grad), known, storage)


class State:
    """One part of a parameter's optimizer state, such as ``exp_avg``."""

    __slots__ = ("part", "slot", "watch")

    def __init__(self, watch: OptimizerWatch, slot: Slot, part: Any) -> None:
        self.watch = watch
        self.slot = slot
        self.part = part

    def tensor(self) -> torch.Tensor | None:
        state = self.watch.state_of(self.slot)
        value = None if state is None else state.get(self.part)
        return value if isinstance(value, torch.Tensor) else None

    def read(self, known: Key | None, storage: int) -> Reading:
        value = self.tensor()
        if value is None:
            return GONE
        if known is not None:
            return read(value, None, known, storage)
        parameter = self.slot.tensor()
        key, storage = read(value, _like(parameter, value), known, storage)
        if _misbuilt(parameter, value):  # its layout promises what it has, and is the wrong one
            key = (*key[:SHAPE_AGREES], False, *key[SHAPE_AGREES + 1 :])
        return key, storage


class Inner(State):
    """A tensor in a list, tuple or dict of a parameter's optimizer state; its part is the path, ``("GG", 0)``. A glance
    does not look into those, so that an optimizer which has them is read row by row."""

    __slots__ = ()

    def tensor(self) -> torch.Tensor | None:
        value = self.watch.state_of(self.slot)
        try:
            for key in self.part:
                value = value[key]  # type: ignore[index]
        except (LookupError, TypeError):  # it is shorter now, or gone
            return None
        return value if isinstance(value, torch.Tensor) else None


class Handed:
    """A tensor that was handed out and is not ours to find again: what was read of it, for as long as that counts."""

    __slots__ = ("key", "stays")

    def __init__(self) -> None:
        self.key: Key | None = None
        self.stays = False  # what became of it counts until the next export

    def tensor(self) -> torch.Tensor | None:
        return None

    def read(self, known: Key | None, storage: int) -> Reading:
        return self.key, NO_STORAGE


def shape_of(value: Any) -> tuple[int, ...] | None:
    """A tensor's shape, None where it has none to tell: nested, not initialised yet, or no tensor at all."""
    try:
        shape = tuple(value.shape)
    except Exception:
        return None
    return shape if all(type(n) is int for n in shape) else None  # turning a symbolic size into a number binds it


def _misbuilt(parameter: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether a DTensor has its parameter's local shape and another global one: built from an uneven shard alone."""
    mine = None if parameter is None else internals.local_tensor(parameter)
    its = internals.local_tensor(other)
    if parameter is None or mine is None or its is None or mine.shape != its.shape or not its.shape:
        return False
    return shape_of(parameter) != shape_of(other)


def _like(parameter: torch.Tensor | None, other: torch.Tensor) -> torch.Size | None:
    """The local shape that a tensor laid out like its parameter has on this rank."""
    if parameter is None or shape_of(parameter) != shape_of(other):
        return None
    local = internals.local_tensor(parameter)
    return None if local is None else local.shape
