"""Finds what a model holds: parameters, buffers, FSDP2 groups, and the names of its modules."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.entries import Buffer, Slot, State
from diagkit.capture.facts import GroupWatch, OptimizerWatch
from diagkit.trace.schema import BUFFER, GROUP, OPTIMIZER_STATE, PARAMETER, Row


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


def survey(root: nn.Module, label: str) -> Survey:
    """Every slot gets a row; a later slot with the same tensor is marked as a tie."""
    found = Survey()
    managed: dict[tuple[int, str], Any] = {}
    for name, _, state in internals.fsdp_states(root):
        for n, group in enumerate(internals.state_groups(state) or [None]):
            row = Row(0, GROUP, label, name, part="" if n == 0 else str(n))
            watch = GroupWatch(weakref.ref(state), None if group is None else weakref.ref(group))
            found.groups.append((row, watch))
            for record in internals.group_params(group):
                for module, slot in internals.param_slots(record):
                    managed[id(module), slot] = record
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        found.names[id(module)] = prefix
        ref = weakref.ref(module)
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            record = managed.get((id(module), name))
            same = id(parameter if record is None else record)
            row = Row(0, PARAMETER, label, dot + name, shape=tuple(parameter.shape))
            found.parameters.append((row, Slot(ref, name, record, same in seen)))
            seen.add(same)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            row = Row(0, BUFFER, label, dot + name, shape=tuple(buffer.shape))
            found.buffers.append((row, Buffer(ref, name, id(buffer) in seen)))
            seen.add(id(buffer))
    return found


def states(
    watch: OptimizerWatch, optimizer: torch.optim.Optimizer, owner: Row, slot: Slot, prefix: str
) -> list[tuple[Row, State]]:
    """Rows for the tensors that the optimizer holds for the parameter in this slot, by name of the part."""
    tensor = None if slot.tie else slot.tensor()
    state = None if tensor is None else optimizer.state.get(tensor)
    return [
        (
            Row(0, OPTIMIZER_STATE, owner.model, owner.name, f"{prefix}{part}", tuple(value.shape), owner.id),
            State(watch, slot, part),
        )
        for part, value in sorted((state or {}).items(), key=lambda item: str(item[0]))
        if isinstance(value, torch.Tensor)
    ]
