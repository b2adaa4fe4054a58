"""The plainest loop over the facts that diagkit reads of each parameter: the yardstick for its reading."""

from __future__ import annotations

from typing import Any

from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.residency import quiet

Managed = tuple[Any, Any, str]


def managed_parameters(model: nn.Module) -> list[Managed]:
    """FSDP2's record of each parameter, with the module and the name of its first slot."""
    return [
        (record, *internals.param_slots(record)[0])
        for _, _, state in internals.fsdp_states(model)
        for group in internals.state_groups(state)
        for record in internals.group_params(group)
    ]


def read_facts(parameters: list[Managed]) -> int:
    """Reads them all, compares with nothing and keeps nothing; returns how many were read."""
    seen = 0
    with quiet():
        for record, module, name in parameters:
            param = record.sharded_param
            local = param._local_tensor
            storage = local.untyped_storage()
            flat = record._sharded_param_data.untyped_storage()
            facts = (
                param.device,
                storage.device,
                param.dtype,
                local.dtype,
                local.is_pinned(),
                record._sharding_spec.mesh.device_type,
                local.shape == record.sharded_size,
                local.numel() == 0,
                param.requires_grad,
                flat.device,
                flat._cdata == storage._cdata,
                module._parameters[name] is param,
                record.sharded_state,
            )
            seen += len(facts)
    return seen
