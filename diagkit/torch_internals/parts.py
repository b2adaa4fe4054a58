"""Which of the private parts that are read and written here a torch no longer has."""

from __future__ import annotations

from torch import nn

from diagkit.torch_internals import fsdp_module, fsdp_states, group_params, state_groups

# What is read of FSDP2's objects, by class; each is set when the object is made.
_PARTS = {
    "FSDPState": ("_is_root", "_state_ctx"),
    "FSDPParamGroup": ("fsdp_params", "offload_policy", "mesh_info", "device", "_training_state", "_sharded_state"),
    "FSDPParam": ("sharded_param", "_sharded_param_data", "sharded_state", "_module_info", "_sharding_spec"),
}


def unreadable(root: nn.Module | None = None) -> list[str]:
    """Private parts that this torch no longer has under the names known here; empty on a known torch.

    Without a module only what FSDP2's own modules offer is looked at, with one also the objects that manage it.
    """
    wanted = {
        "_fsdp_state": ("_get_module_fsdp_state", "FSDPState"),
        "_fsdp_param": ("FSDPParam", "ShardedState"),
        "_fsdp_param_group": ("FSDPParamGroup",),
    }
    missing = [
        f"{name}.{part}"
        for name, parts in wanted.items()
        if (module := fsdp_module(name))
        for part in parts
        if not hasattr(module, part)
    ]
    param = getattr(fsdp_module("_fsdp_param"), "FSDPParam", None)
    if param is not None and not hasattr(param, "reset_sharded_param"):
        missing.append("FSDPParam.reset_sharded_param")
    for _, _, state in fsdp_states(root) if root is not None else ():
        missing += _absent("FSDPState", state)
        if not hasattr(state, "_fsdp_param_groups") and not hasattr(state, "_fsdp_param_group"):
            missing.append("FSDPState._fsdp_param_groups")
        if not hasattr(getattr(state, "_state_ctx", state), "post_backward_final_callback_queued"):
            missing.append("FSDPStateContext.post_backward_final_callback_queued")
        for group in state_groups(state):
            missing += _absent("FSDPParamGroup", group)
            for fsdp_param in group_params(group)[:1]:
                missing += _absent("FSDPParam", fsdp_param)
    return list(dict.fromkeys(missing))


def _absent(name: str, thing: object) -> list[str]:
    return [f"{name}.{part}" for part in _PARTS[name] if not hasattr(thing, part)]
