"""Mends where tensors are: parameters, their gradients and optimizer state, and buffers.

What is done follows the facts of the live model, and not the findings alone: a shard without elements is no hazard by
itself, and yet the first forward pass asks that it be on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.residency import residency
from diagkit.remedy.look import Look
from diagkit.remedy.mend import Act, Mend, answers, count
from diagkit.remedy.offloaded import Offloaded
from diagkit.remedy.passes import broken_off
from diagkit.torch_internals import writers
from diagkit.trace.schema import Residency, device_type

#: Levels of lists and dicts in an optimizer's state that are looked into.
_DEPTH = 4


def settle_parameters(look: Look) -> Mend | None:
    """Parameters under the policy whose metadata, bytes and flat bytes are not one on the CPU, pinned as it wants."""
    lost = [entry for entry in look.kept if _is_lost(entry)]
    if not lost:
        return None
    others = [
        entry.name
        for entry in lost
        if residency(entry.record.sharded_param, entry.record).aliased is False
        and writers.reads_other_values(entry.record)
    ]
    outcome = "on the CPU again; metadata, bytes and what all-gather reads are one"
    notes: tuple[str, ...] = ()
    if others:
        some = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        notes = (
            f"{count(others, 'parameter')} had two different values ({some}): what the optimizer trained and "
            "state_dict() shows was kept, forward passes had computed with the other. If that is wrong, load a "
            "checkpoint",
        )
    acts = tuple((entry.name, functools.partial(_settle, entry)) for entry in lost)
    return Mend("parameters", "{n} parameter{s}", outcome, acts, answers(look, "parameters"), notes)


def _settle(entry: Offloaded) -> None:
    writers.reshard(entry.group)
    writers.settle(entry.record, entry.facts.pin_memory)


def _is_lost(entry: Offloaded) -> bool:
    facts = residency(entry.record.sharded_param, entry.record)
    if (
        facts.unreadable
        or facts.metadata_device == "meta"
        or facts.registered is False
        or not internals.is_plain(entry.record)
    ):
        return False
    unpinned = entry.facts.pin_memory and not (facts.pinned and facts.flat_pinned)
    return not _at(facts, "cpu") or (not facts.empty and (facts.aliased is False or unpinned))


def rehome_gradients(look: Look) -> Mend | None:
    """Gradients that are not where their parameter is, or are split; those of a pass that broke off are dropped."""
    kept = {id(entry.record.sharded_param) for entry in look.kept}
    dropped = broken_off(look)
    acts: list[tuple[str, Act]] = []
    for name, parameter in look.parameters():
        if parameter.grad is None or id(parameter) in dropped:
            continue
        home = "cpu" if id(parameter) in kept else device_type(residency(parameter).storage_device)
        if home is not None and not _at(residency(parameter.grad), home):
            acts.append((name, functools.partial(_rehome_gradient, parameter, home)))
    codes = answers(look, "gradients")
    return Mend("gradients", "{n} gradient{s}", "where the parameter is", tuple(acts), codes) if acts else None


def _rehome_gradient(parameter: torch.Tensor, home: str) -> None:
    if not _at(residency(parameter), home):
        raise RuntimeError(f"its parameter is not on {home} yet, but {residency(parameter).short()}")
    writers.rehome_gradient(parameter)


class Rehomed:
    """Tensors that were brought somewhere; one that is held in two places stays one. The old ones are kept meanwhile:
    the id of one that is gone is soon another's."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        """The one for this tensor, made when it is first asked for."""
        if id(tensor) not in self._done:
            self._done[id(tensor)] = tensor, writers.rehomed(tensor, device)
        return self._done[id(tensor)][1]


def rehome_states(look: Look) -> Mend | None:
    """Optimizer state of parameters under the policy that is not on the CPU, or that is split; also in the lists,
    tuples and dicts that some optimizers keep. A fused or capturable optimizer makes its ``step`` where the parameter
    is, which is the CPU as well."""
    kept = {id(entry.record.sharded_param): entry.name for entry in look.kept}
    moved = Rehomed()
    acts = [
        (name, functools.partial(_rehome_state, holder, key, moved))
        for optimizer in look.optimizers
        for parameter in optimizer.state
        if id(parameter) in kept
        for name, holder, key in _lost_states(optimizer.state, parameter, kept[id(parameter)], ())
    ]
    subject = "{n} tensor{s} of optimizer state"
    codes = answers(look, "optimizer state")
    return (
        Mend("optimizer state", subject, "on the CPU, where the parameters are", tuple(acts), codes) if acts else None
    )


def _lost_states(holder: Any, key: Any, owner: str, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Name, holder and key of each thing in ``holder[key]`` that must be exchanged: a tensor, or a tuple with one."""
    value = holder[key]
    if isinstance(value, (torch.Tensor, tuple)):
        if any(map(_is_astray, _tensors(value))):
            yield f"{owner} [{'.'.join(path)}]" if path else owner, holder, key
    elif isinstance(value, (list, dict)) and len(path) < _DEPTH:
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _lost_states(value, inner, owner, (*path, str(inner)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _is_astray(tensor: torch.Tensor) -> bool:
    facts = residency(tensor)
    return not facts.unreadable and facts.metadata_device != "meta" and not _at(facts, "cpu")


def _rehome_state(holder: Any, key: Any, moved: Rehomed) -> None:
    def settled(value: Any) -> Any:
        if isinstance(value, tuple):
            items = [settled(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        astray = isinstance(value, torch.Tensor) and _is_astray(value)
        return moved.at(torch.device("cpu"), value) if astray else value

    holder[key] = settled(holder[key])


def move_buffers(look: Look) -> Mend | None:
    """Buffers that were found on the CPU where a forward pass needs them on the accelerator."""
    acts: dict[tuple[int, str], tuple[str, Act]] = {}
    moved = Rehomed()
    for model in look.models:
        devices = _devices(model)
        for prefix, module in internals.named_modules(model):
            for slot, buffer in module._buffers.items():
                name = f"{prefix}.{slot}" if prefix else slot
                if name in look.buffers and buffer is not None and devices:
                    acts[id(module), slot] = name, functools.partial(_move_buffer, module, slot, devices[0], moved)
    codes = answers(look, "buffers")
    return Mend("buffers", "{n} buffer{s}", "on the accelerator again", tuple(acts.values()), codes) if acts else None


def _devices(model: nn.Module) -> list[torch.device]:
    """Where the model's FSDP groups compute."""
    groups = [group for _, _, state in internals.fsdp_states(model) for group in internals.state_groups(state)]
    return [torch.device(group.device) for group in groups]


def _move_buffer(module: nn.Module, slot: str, device: torch.device, moved: Rehomed) -> None:
    buffer = module._buffers[slot]
    if buffer is not None:
        module._buffers[slot] = moved.at(device, buffer)


def _at(facts: Residency, device: str) -> bool:
    """Whether metadata and bytes are both there."""
    return device_type(facts.metadata_device) == device_type(facts.storage_device) == device
