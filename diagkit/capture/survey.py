"""Finds what a model holds: parameters, buffers, FSDP2 groups, and the names of its modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.entries import Buffer, Inner, Slot, State, shape_of
from diagkit.capture.facts import GroupWatch, OptimizerWatch
from diagkit.trace.schema import BUFFER, GROUP, OPTIMIZER_STATE, PARAMETER, Row

#: Levels of lists and dicts in an optimizer's state that are looked into.
DEPTH = 4


@dataclass(slots=True)
class Model:
    """One watched model: its label and root, and the names of its modules by id."""

    label: str
    root: weakref.ref[nn.Module]
    names: dict[int, str]


@dataclass(slots=True)
class Survey:
    """Rows (their ids still to be given) with what stands behind each, in the order of ``named_modules()``."""

    parameters: list[tuple[Row, Slot]] = field(default_factory=list)
    buffers: list[tuple[Row, Buffer]] = field(default_factory=list)
    groups: list[tuple[Row, GroupWatch]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # id(module) -> name
    faults: list[str] = field(default_factory=list)  # what could not be taken in, and why

    def shielded(self, what: str, take: Callable[..., None], *args: Any) -> None:
        """Takes one thing in; one that cannot be must not hide the others."""
        try:
            take(*args)
        except Exception as error:
            self.faults.append(f"{what}: {type(error).__name__}: {error}"[:500])


def survey(root: nn.Module, label: str) -> Survey:
    """Every slot gets a row; a later slot with the same tensor is marked as a tie. What cannot be taken in is told and
    left out alone."""
    found = Survey()
    managed: dict[tuple[int, str], Any] = {}
    for name, _, state in internals.fsdp_states(root):
        found.shielded(f"FSDP2 at {name or 'the root'}", _take_groups, found, managed, label, name, state)
    seen: set[int] = set()
    for prefix, module in internals.named_modules(root):
        found.names[id(module)] = prefix
        dot = f"{prefix}." if prefix else ""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                record = managed.get((id(module), name))
                row = Row(0, PARAMETER, label, f"{dot}{name}")
                found.shielded(row.name, _take_parameter, found, seen, row, module, name, parameter, record)
        for name, buffer in list(module._buffers.items()):
            if isinstance(buffer, torch.Tensor):  # some keep a number there; what is no tensor lives nowhere
                row = Row(0, BUFFER, label, f"{dot}{name}")
                found.shielded(row.name, _take_buffer, found, seen, row, module, name, buffer)
    return found


def _take_groups(found: Survey, managed: dict[tuple[int, str], Any], label: str, name: str, state: Any) -> None:
    for n, group in enumerate(internals.state_groups(state) or [None]):
        row = Row(0, GROUP, label, name, part="" if n == 0 else str(n))
        watch = GroupWatch(weakref.ref(state), None if group is None else weakref.ref(group))
        found.groups.append((row, watch))
        for record in internals.group_params(group):
            for module, slot in internals.param_slots(record):
                managed[id(module), slot] = record


def _take_parameter(
    found: Survey, seen: set[int], row: Row, module: nn.Module, name: str, parameter: Any, record: Any
) -> None:
    same = id(parameter if record is None else record)
    slot = Slot(weakref.ref(module), name, record, same in seen)
    found.parameters.append((replace(row, shape=shape_of(parameter)), slot))
    seen.add(same)


def _take_buffer(found: Survey, seen: set[int], row: Row, module: nn.Module, name: str, buffer: Any) -> None:
    found.buffers.append((replace(row, shape=shape_of(buffer)), Buffer(weakref.ref(module), name, id(buffer) in seen)))
    seen.add(id(buffer))


def states(
    watch: OptimizerWatch, optimizer: torch.optim.Optimizer, owner: Row, slot: Slot, prefix: str
) -> list[tuple[Row, State]]:
    """Rows for the tensors that the optimizer holds for the parameter in this slot, by name of the part."""
    tensor = None if slot.tie else slot.tensor()
    state = None if tensor is None else optimizer.state.get(tensor)
    found: list[tuple[Row, State]] = []
    for path, value in _tensors(state or {}):
        part = prefix + ".".join(map(str, path))
        row = Row(0, OPTIMIZER_STATE, owner.model, owner.name, part, shape_of(value), owner.id)
        found.append((row, State(watch, slot, path[0]) if len(path) == 1 else Inner(watch, slot, path)))
    return found


def _tensors(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in an optimizer's state, with the keys that lead to each. Preconditioners stand in lists."""
    if isinstance(held, torch.Tensor):
        yield path, held
    elif isinstance(held, (Mapping, list, tuple)) and len(path) < DEPTH:
        pairs = sorted(held.items(), key=lambda item: str(item[0])) if isinstance(held, Mapping) else enumerate(held)
        for key, inner in pairs:
            yield from _tensors(inner, (*path, key))
