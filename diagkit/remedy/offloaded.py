"""The parameters that FSDP2 keeps on the CPU by policy: what a guard watches over and what is mended.

Left out is what may rightly be elsewhere: a policy with fields beyond those of torch 2.13 (per-phase flags are under
way), and a mesh of CPUs, where there is nowhere else to be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.facts import GroupWatch
from diagkit.capture.parts import models_of, outermost
from diagkit.trace.schema import GroupFacts


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One parameter under `CPUOffloadPolicy`."""

    name: str  # fully qualified
    record: Any  # FSDP2's FSDPParam
    group: Any  # its FSDPParamGroup
    facts: GroupFacts
    owner: nn.Module  # the module that `fully_shard` was called on


def group_facts(state: Any, group: Any) -> GroupFacts:
    """The facts of a group now (of the state alone, where it has none)."""
    return GroupWatch(weakref.ref(state), None if group is None else weakref.ref(group)).read() or GroupFacts()


def offloaded(root: nn.Module, wanted: Callable[[Any], bool] | None = None) -> Iterator[Offloaded]:
    """Every parameter in the model that the policy keeps on the CPU, ties once; ``wanted`` chooses records, and nothing
    is read of groups that have none."""
    names: dict[int, str] = {}
    for _, owner, state in internals.fsdp_states(root):
        for group in internals.state_groups(state):
            records = [record for record in internals.group_params(group) if wanted is None or wanted(record)]
            if not records:
                continue
            facts = group_facts(state, group)
            if not facts.offload or facts.policy_flags or facts.mesh_device in (None, "cpu"):
                continue
            names = names or {id(module): name for name, module in internals.named_modules(root)}
            for record in records:
                module, slot = internals.param_slots(record)[0]
                prefix = names.get(id(module), "")
                yield Offloaded(f"{prefix}.{slot}" if prefix else slot, record, group, facts, owner)


def is_engine(subject: object) -> bool:
    """Whether it is neither a module nor several of them, but something that may hold one."""
    return not isinstance(subject, (nn.Module, Mapping, list, tuple))


def models_in(subject: object) -> dict[str, nn.Module]:
    """The models that were named: one, several by name or in a row, or those that an engine holds. One that is named
    twice, or is part of another, counts once."""
    if is_engine(subject) or isinstance(subject, nn.Module):
        return models_of(subject)
    if isinstance(subject, Mapping):
        named = {str(name): model for name, model in subject.items() if isinstance(model, nn.Module)}
    else:
        models = [model for model in cast("list[object]", subject) if isinstance(model, nn.Module)]
        named = {f"model{n + 1}" if n else "model": model for n, model in enumerate(models)}
    first = {id(model): name for name, model in reversed(named.items())}
    return outermost({name: model for name, model in named.items() if first[id(model)] == name})
