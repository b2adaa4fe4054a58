"""Mends where tensors are: parameters, their gradients and optimizer state, and buffers.

What is done follows the facts of the live model, and not the findings alone: a shard without elements is no hazard by
itself, and yet the first forward pass asks that it be on the CPU.
"""

from __future__ import annotations

import functools
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
    what = count(lost, "parameter") + ": on the CPU again; metadata, bytes and what all-gather reads are one"
    notes: tuple[str, ...] = ()
    if others:
        some = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        notes = (
            f"{count(others, 'parameter')} had two different values ({some}): what the optimizer trained and "
            "state_dict() shows was kept, forward passes had computed with the other. If that is wrong, load a "
            "checkpoint",
        )
    acts = tuple((entry.name, functools.partial(_settle, entry)) for entry in lost)
    return Mend("parameters", what, acts, answers(look, "parameters"), notes)


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
    acts = []
    for name, parameter in look.parameters():
        if parameter.grad is None or id(parameter) in dropped:
            continue
        home = "cpu" if id(parameter) in kept else device_type(residency(parameter).storage_device)
        if home is not None and not _at(residency(parameter.grad), home):
            acts.append((name, functools.partial(writers.rehome_gradient, parameter)))
    what = count(acts, "gradient") + ": where the parameter is"
    return Mend("gradients", what, tuple(acts), answers(look, "gradients")) if acts else None


def rehome_states(look: Look) -> Mend | None:
    """Optimizer state of parameters under the policy that is not on the CPU, or that is split."""
    kept = {id(entry.record.sharded_param): entry.name for entry in look.kept}
    acts: list[tuple[str, Act]] = []
    for optimizer in look.optimizers:
        deliberate = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        for parameter, state in optimizer.state.items():
            name = kept.get(id(parameter))
            for part, value in state.items() if name else ():
                if not isinstance(value, torch.Tensor) or (part == "step" and deliberate):
                    continue
                facts = residency(value)
                if not facts.unreadable and facts.metadata_device != "meta" and not _at(facts, "cpu"):
                    acts.append((f"{name} [{part}]", functools.partial(_rehome_state, state, part)))
    what = count(acts, "tensor") + " of optimizer state: on the CPU, where the parameters are"
    return Mend("optimizer state", what, tuple(acts), answers(look, "optimizer state")) if acts else None


def _rehome_state(state: dict[Any, Any], part: Any) -> None:
    state[part] = writers.rehomed(state[part], torch.device("cpu"))


def move_buffers(look: Look) -> Mend | None:
    """Buffers that were found on the CPU where a forward pass needs them on the accelerator."""
    acts: list[tuple[str, Act]] = []
    moved: dict[int, torch.Tensor] = {}  # a buffer in two places stays one
    for model in look.models:
        devices = _devices(model)
        for prefix, module in internals.named_modules(model):
            for slot, buffer in module._buffers.items():
                name = f"{prefix}.{slot}" if prefix else slot
                if name in look.buffers and buffer is not None and devices:
                    acts.append((name, functools.partial(_move_buffer, module, slot, devices[0], moved)))
    what = count(acts, "buffer") + ": on the accelerator again"
    return Mend("buffers", what, tuple(acts), answers(look, "buffers")) if acts else None


def _devices(model: nn.Module) -> list[torch.device]:
    """Where the model's FSDP groups compute."""
    groups = [group for _, _, state in internals.fsdp_states(model) for group in internals.state_groups(state)]
    return [torch.device(group.device) for group in groups]


def _move_buffer(module: nn.Module, slot: str, device: torch.device, moved: dict[int, torch.Tensor]) -> None:
    buffer = module._buffers[slot]
    if buffer is not None:
        module._buffers[slot] = moved.setdefault(id(buffer), buffer.to(device))


def _at(facts: Residency, device: str) -> bool:
    """Whether metadata and bytes are both there."""
    return device_type(facts.metadata_device) == device_type(facts.storage_device) == device
