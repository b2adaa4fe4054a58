"""The live things that are to be mended, and what was found out about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.remedy.offloaded import Offloaded, group_facts, offloaded
from diagkit.trace.schema import GroupFacts

#: Name, state and facts of each group; a state without parameters counts as one.
Tree = list[tuple[str, Any, GroupFacts]]


@dataclass(frozen=True, slots=True)
class Look:
    """The live things, and what was found out about them."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    codes: frozenset[str]  # of the findings
    buffers: frozenset[str]  # names of buffers that were found on the wrong side
    kept: tuple[Offloaded, ...]  # parameters under the policy

    @classmethod
    def at(
        cls,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        codes: Iterable[str],
        buffers: Iterable[str],
    ) -> Look:
        models = tuple(models)
        kept = {id(entry.record): entry for model in models for entry in offloaded(model)}  # models may share parts
        return cls(models, tuple(optimizers), frozenset(codes), frozenset(buffers), tuple(kept.values()))

    def trees(self) -> Iterator[tuple[nn.Module, Any, Tree]]:
        """Module and state of each FSDP root after lazy init, and the groups in its tree."""
        for model in self.models:
            names = {id(module): name for name, module in internals.named_modules(model)}
            for _, root, state in internals.fsdp_states(model):
                if not group_facts(state, None).root:
                    continue
                tree = [
                    (names.get(id(module)) or type(module).__name__, inner, group_facts(inner, group))
                    for _, module, inner in internals.fsdp_states(root)
                    for group in internals.state_groups(inner) or [None]
                ]
                yield root, state, tree

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter once: FSDP2's sharded one, also while the gathered one is in its slot."""
        managed: dict[tuple[int, str], Any] = {}
        for model in self.models:
            for _, _, state in internals.fsdp_states(model):
                for group in internals.state_groups(state):
                    for record in internals.group_params(group):
                        managed.update(((id(m), slot), record) for m, slot in internals.param_slots(record))
        seen: set[int] = set()
        for model in self.models:
            for prefix, module in internals.named_modules(model):
                for slot, held in module._parameters.items():
                    record = managed.get((id(module), slot))
                    parameter = held if record is None else record.sharded_param
                    if parameter is not None and id(parameter) not in seen and parameter.is_leaf:
                        seen.add(id(parameter))
                        yield (f"{prefix}.{slot}" if prefix else slot), parameter
