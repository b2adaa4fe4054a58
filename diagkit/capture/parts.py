"""Finds the models and optimizers that an engine holds, whatever it calls them.

Only plain attributes are read: a property of the engine's may compute, communicate or move something.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals

#: Attributes looked at first, by the names that engines and trainers use.
_MODELS = ("module", "model", "actor_module_fsdp", "model_wrapped", "net")
#: Members of a list or dict looked at, and levels of plain objects.
_MEMBERS, _DEPTH = 64, 1


def models_of(engine: object) -> dict[str, nn.Module]:
    """The models that an engine holds, by attribute; one that contains another stands for both.

    Where FSDP2 manages some of them, only those: an engine also holds losses and adapters. An engine that is a module
    is its own model.
    """
    if isinstance(engine, nn.Module):
        return {"model": engine}
    found: dict[str, nn.Module] = {}
    for name, value in _members(engine, _DEPTH):
        if isinstance(value, nn.Module) and all(value is not other for other in found.values()):
            found[name] = value
    sharded = {name: module for name, module in found.items() if internals.has_fsdp(module)}
    return outermost(sharded or found)


def optimizers_of(engine: object) -> list[torch.optim.Optimizer]:
    """The optimizers that an engine holds."""
    found = {id(value): value for _, value in _members(engine, _DEPTH) if isinstance(value, torch.optim.Optimizer)}
    return list(found.values())


def outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of the modules that no other one of them contains."""
    inner = {id(m) for module in modules.values() for _, m in internals.named_modules(module) if m is not module}
    return {name: module for name, module in modules.items() if id(module) not in inner}


def _members(thing: object, depth: int) -> list[tuple[str, Any]]:
    held = _attributes(thing)
    held.sort(key=lambda pair: _MODELS.index(pair[0]) if pair[0] in _MODELS else len(_MODELS))
    found: list[tuple[str, Any]] = []
    for name, value in held:
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            found.append((name, value))
        elif isinstance(value, dict):
            found += [(str(key), member) for key, member in _some(value.items())]
        elif isinstance(value, (list, tuple)):
            found += [(f"{name}.{n}", member) for n, member in _some(enumerate(value))]
        elif depth and type(value).__module__ != "builtins" and not isinstance(value, (torch.Tensor, type)):
            found += [(inner, member) for inner, member in _members(value, depth - 1) if _wanted(member)]
    return [(name, value) for name, value in found if _wanted(value)]


def _some(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [pair for _, pair in zip(range(_MEMBERS), pairs, strict=False)]


def _wanted(value: object) -> bool:
    return isinstance(value, (nn.Module, torch.optim.Optimizer))


def _attributes(thing: object) -> list[tuple[str, Any]]:
    found = list(getattr(thing, "__dict__", {}).items()) if hasattr(type(thing), "__dict__") else []
    for owner in type(thing).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            try:
                found.append((name, getattr(thing, name)))
            except AttributeError:  # a slot that is not filled yet
                continue
    return found
