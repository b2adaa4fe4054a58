"""The writers' side of the door: each write to a private part of FSDP2 or DTensor is one named function here.

For `remedy`, and for the lab's engines, which do what the field's engines do. The rules: a writer does one thing and
asks nothing of whoever calls it; it communicates with no other rank; what a parameter *is* (the object that the
optimizer holds) never changes, only what is behind it; values are copied and compared, never computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from diagkit.errors import UnsupportedTorch
from diagkit.torch_internals import fsdp_module, group_params, local_tensor, state_groups

_CPU = torch.device("cpu")

# ---- a pass that an exception ended


def set_idle(group: Any) -> None:
    """Makes an FSDP group, or its state, forget the forward or backward pass that it believes to be in."""
    group._training_state = type(group._training_state).IDLE


def end_pass(root: Any, states: Iterable[Any]) -> None:
    """Ends, for a root state and the states under it, whatever pass was under way: all idle, all sharded, nothing
    pending. Since torch 2.13 PyTorch has a function for it, before that its parts are put back one by one.

    What a broken-off backward needs of it to train on exactly (torch 2.13, each part left out in turn): the final
    callback's mark cleared, `drop_gathered_gradients`, and idle groups where it broke off in the last of them.
    Resharding changes no number; without it the slots hold gathered parameters until the next forward pass.
    """
    states = list(states)
    if hasattr(root._comm_ctx, "device_handle"):  # made by lazy init
        reset = getattr(root, "_reset_iter_state", None)
        _put_back(root, states) if reset is None else reset()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    for state in states:  # also those that an unfinished lazy init never took in
        set_idle(state)
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in state_groups(state):
            set_idle(group)
            reshard(group)


def _put_back(root: Any, states: Iterable[Any]) -> None:
    shared = root._comm_ctx
    now = shared.device_handle.current_stream()
    for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
        now.wait_stream(getattr(shared, name))
    shared.post_forward_order.clear()
    shared.all_gather_state = shared.reduce_scatter_state = None
    getattr(shared, "reduce_scatter_states", []).clear()  # several instead of one between 2.9 and 2.13
    for group in [group for state in states for group in state_groups(state)]:
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output"):
            setattr(group, name, None)
        group._reshard_after_forward_event = None
        group._post_forward_indices.clear()


def reshard(group: Any) -> None:
    """Puts the sharded parameters of a group back into their modules and frees the gathered ones."""
    group._to_sharded()


def drop_gathered_gradients(group: Any) -> int:
    """Drops what backward passes left on the gathered parameters of a group; how many parameters had something."""
    dropped = 0
    for record in group_params(group):
        gathered = getattr(record, "_unsharded_param", None)
        held = record.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None
        dropped += held
        record.unsharded_accumulated_grad = None
        if gathered is not None:
            gathered.grad = None
    return dropped


def forget_lazy_init(states: Iterable[Any]) -> None:
    """Lets FSDP2 initialise these states anew in the next forward pass."""
    for state in states:
        set_idle(state)  # otherwise the next forward pass skips what only the first of a pass does
        state._is_root = None
        state._state_ctx.all_states.clear()  # lazy init appends to it
        state._state_ctx.iter_forward_root = None
        for group in state_groups(state):
            group._module_fqn = None


# ---- where tensors are


def rehomed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on this device, metadata and bytes: of a DTensor a new one of the same layout around its values."""
    local = local_tensor(tensor)
    return tensor.to(device) if local is None else _laid_out_like(tensor, local.to(device))


def rehome_gradient(parameter: torch.Tensor) -> None:
    """Brings a parameter's gradient to where the parameter is."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        parameter.grad = rehomed(gradient, parameter.device)


def reads_other_values(record: Any) -> bool:
    """Whether all-gather reads other values than the local tensor holds, byte for byte."""
    local, flat = record.sharded_param._local_tensor, record._sharded_param_data
    with torch.no_grad():
        one, other = (part.to(_CPU).contiguous().view(-1)[: local.numel()] for part in (local, flat))
        return one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def on_every_rank(record: Any) -> bool:
    """Whether each rank holds an element of the parameter: not of a bias of one element over two ranks."""
    ranks = getattr(record.mesh_info, "shard_mesh_size", 1)
    dim = getattr(record.fsdp_placement, "dim", 0)
    return ranks == 1 or bool(record.padded_sharded_param_size[dim] * (ranks - 1) < record.sharded_param.shape[dim])


def settle(record: Any, pin: bool) -> None:
    """Puts one offloaded parameter back together on the CPU: metadata, local tensor, and the flat bytes that all-gather
    reads. The local tensor, which the optimizer trains and `state_dict()` shows, is what stays. Its gradient comes too.

    Raises:
        RuntimeError: memory cannot be pinned, or PyTorch cannot swap the parameter (it has a weak reference). Nothing
            has changed then.
    """
    parameter, flat = record.sharded_param, record._sharded_param_data
    local = parameter._local_tensor
    with torch.no_grad():
        if not (_is_home(local, pin) and local.untyped_storage()._cdata == flat.untyped_storage()._cdata):
            dim = record.fsdp_placement.dim
            padded = torch.zeros(record.padded_sharded_param_size, dtype=local.dtype, device=_CPU)
            if pin:
                padded = padded.pin_memory()
            local = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0).copy_(local)
            flat = padded.view(-1)
        _exchange(parameter, nn.Parameter(_laid_out_like(parameter, local), requires_grad=parameter.requires_grad))
    record._sharded_param_data = flat
    record._sharding_spec = parameter._spec


def _is_home(local: torch.Tensor, pin: bool) -> bool:
    return local.device == _CPU and (local.is_pinned() or not pin or not local.numel())


def _laid_out_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with the same layout around this local tensor."""
    wrap = getattr(fsdp_module("_fsdp_common"), "_from_local_no_grad", None)
    if wrap is None:
        raise UnsupportedTorch(
            "no way known to lay out a DTensor", found=f"torch {torch.__version__}", expected="_from_local_no_grad"
        )
    with torch.no_grad():
        return wrap(local, tensor._spec)  # type: ignore[attr-defined, no-any-return]


def _exchange(parameter: nn.Parameter, fresh: nn.Parameter) -> None:
    """Gives the parameter what is behind the fresh one, as `nn.Module._apply` does, and its gradient on the CPU."""
    vars(fresh).update(vars(parameter))  # a user's own attributes stay with the object
    gradient, parameter.grad = parameter.grad, None
    try:
        torch.utils.swap_tensors(parameter, fresh)
    except Exception:
        parameter.grad = gradient
        raise
    parameter.grad = None if gradient is None else rehomed(gradient, _CPU)
