"""The one door to PyTorch's private FSDP2 and DTensor parts.

Readers here, writers apart in `writers`. Each name that PyTorch may rename or drop is looked up here
and nowhere else, and a reader answers None where it is gone; `parts.unreadable` says which. Nothing here runs a tensor
operation: ``_local_tensor`` is an attribute, while ``.data``, ``detach()`` or ``to_local()`` are operations, and on
a split parameter some of them raise.

Nothing is imported that the job has not imported: a process without DTensor in ``sys.modules`` has no DTensor.
Sources: torch/distributed/fsdp/_fully_shard/_fsdp_{param,param_group,state}.py, torch/distributed/tensor/_api.py;
read at 2.9.1 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

#: The oldest torch whose FSDP2 has the parts read here.
CAPTURE_FLOOR = (2, 8)

_FSDP = "torch.distributed.fsdp._fully_shard"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def torch_version() -> tuple[int, int]:
    """``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def loaded(name: str) -> ModuleType | None:
    """A module, if the job has imported it."""
    return sys.modules.get(name)


# ---- the compiler

#: True where Dynamo traces a call, and known to it beforehand: so code that it compiles holds nothing of a caller who
#: asks, and is the same whether somebody records or not.
compiling = torch.compiler.is_dynamo_compiling


def uncompiled(function: _Function) -> _Function:
    """The function. Where compiled code calls it, Dynamo compiles neither it nor what it calls. Without effect where
    torch has no such word (read at 2.13.0, torch/csrc/dynamo/eval_frame.c)."""
    with contextlib.suppress(Exception):
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


# ---- the process


def rank_and_world() -> tuple[int, int]:
    """Rank and number of ranks: of the main process group, else as the launcher says."""
    dist = loaded("torch.distributed.distributed_c10d")
    if dist is not None and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def accelerator() -> tuple[str, bool]:
    """Type of the accelerator of this process ("cpu" for none), and whether it is diagkit's simulated one."""
    find = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    device = find() if find is not None else None
    if device is None:
        return "cpu", False
    return device.type, bool(getattr(getattr(torch, device.type, None), "is_simulated", False))


def accelerator_index(device: str) -> int | None:
    """Index of the current device, None where asking would initialise it."""
    module = getattr(torch, device, None)
    ready = getattr(module, "is_initialized", None)
    if device == "cpu" or ready is None or not ready():
        return None
    return int(module.current_device())  # type: ignore[union-attr]


def accelerator_memory(device: str) -> int:
    """MiB of memory that the current device has, 0 where it does not say or asking would initialise it."""
    return int(getattr(_properties(device), "total_memory", 0)) >> 20


def accelerator_uuid(device: str) -> str:
    """What the current device is known by whatever a process may see, "" as for `accelerator_memory`."""
    return str(getattr(_properties(device), "uuid", ""))


def _properties(device: str) -> Any | None:
    index = accelerator_index(device)
    read = None if index is None else getattr(getattr(torch, device), "get_device_properties", None)
    return None if read is None else read(index)


# ---- DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """A DTensor's local tensor, None for any other tensor. Reads an attribute, runs nothing."""
    return getattr(tensor, "_local_tensor", None)


def innermost(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor inside nested subclasses (DTensor, float8, AsyncCollectiveTensor); None: cannot be told."""
    for _ in range(8):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            return tensor
        inner = local_tensor(tensor)
        if inner is None:
            inner = getattr(tensor, "elem", None)  # AsyncCollectiveTensor
        if inner is None:
            flatten = getattr(type(tensor), "__tensor_flatten__", None)
            if flatten is None:
                return tensor if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else None
            names = flatten(tensor)[0]
            inner = getattr(tensor, names[0], None) if names else None
        if not isinstance(inner, torch.Tensor):
            return None
        tensor = inner
    return None


def address(tensor: torch.Tensor) -> int:
    """Where a plain tensor's bytes begin, for reading; asking for writing would part a lazy copy from its source."""
    if hasattr(tensor, "const_data_ptr"):
        return int(tensor.const_data_ptr())
    return int(getattr(torch._C, "_data_address", torch.Tensor.data_ptr)(tensor))  # torch before 2.13


def was_written(tensor: torch.Tensor) -> bool:
    """Whether the tensor was written in place since it was made; True where it does not count."""
    try:
        return tensor._version > 0
    except RuntimeError:  # made in inference mode
        return True


def storage_uses(address: int) -> int:
    """How many tensors and others hold the storage at this address (which a weak reference must keep from being used
    again); 0 where this torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(address))


def dtensor_mesh(tensor: torch.Tensor) -> Any | None:
    """A DTensor's device mesh, None for any other tensor."""
    return getattr(getattr(tensor, "_spec", None), "mesh", None)


def promised_local_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The local shape that a DTensor's layout promises this rank, None where it cannot be told."""
    spec = getattr(tensor, "_spec", None)
    module = loaded("torch.distributed.tensor._utils")
    compute = getattr(module, "compute_local_shape_and_global_offset", None)
    if spec is None or compute is None:
        return None
    try:
        shape, _ = compute(tuple(spec.shape), spec.mesh, spec.placements)
    except Exception:  # a layout that this torch cannot compute is no finding
        return None
    return tuple(shape)


def mesh_text(mesh: Any) -> str:
    """``"npu (2,) fsdp"``."""
    names = getattr(mesh, "mesh_dim_names", None)
    shape = tuple(getattr(mesh, "shape", ()))
    return f"{mesh_device(mesh) or '?'} {shape}" + (f" {' x '.join(names)}" if names else "")


def mesh_device(mesh: Any) -> str | None:
    """Device type of a mesh."""
    return getattr(mesh, "device_type", None)


def mesh_size(mesh: Any) -> int:
    """Number of ranks in a mesh."""
    size = 1
    for n in getattr(mesh, "shape", ()):
        size *= int(n)
    return size


def mesh_backends(mesh: Any) -> str:
    """Backends of the mesh's first process group by device type, ``"cpu:gloo,npu:hccl"``; "" where no group is up."""
    try:
        return group_backends(mesh.get_group(0))
    except Exception:  # a mesh of one device, or one whose groups are gone
        return ""


def group_backends(group: Any = None) -> str:
    """Backends of a process group (default: the main one) by device type; "" where none is up."""
    dist = loaded("torch.distributed.distributed_c10d")
    if dist is None or not dist.is_initialized():
        return ""
    try:
        return str(dist.get_backend_config(group))
    except Exception:
        return ""


def default_store() -> Any | None:
    """The store through which the ranks of the main process group found each other; None where there is none."""
    dist = loaded("torch.distributed.distributed_c10d")
    if dist is None or not dist.is_initialized():
        return None
    get = getattr(dist, "_get_default_store", None)
    return None if get is None else get()


# ---- FSDP2


def fsdp_module(name: str) -> ModuleType | None:
    """One of FSDP2's private modules ("_fsdp_param", "_fsdp_state", ...); None until the job imports it."""
    return loaded(f"{_FSDP}.{name}")


def fsdp_state(module: nn.Module) -> Any | None:
    """The FSDPState of a module, None where ``fully_shard`` never saw it."""
    get = getattr(fsdp_module("_fsdp_state"), "_get_module_fsdp_state", None)
    if get is None:
        return None
    try:
        return get(module)
    except Exception:  # "state has already been garbage collected"
        return None


def has_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 manages the module or one inside it."""
    return fsdp_module("_fsdp_state") is not None and any(fsdp_state(m) is not None for _, m in named_modules(module))


def all_fsdp_modules() -> list[nn.Module]:
    """Every live module that ``fully_shard`` was applied to, in this process; empty where that cannot be told."""
    known = getattr(loaded("torch.distributed._composable_state"), "_module_state_mapping", None)
    return [] if known is None else [m for m in list(known) if fsdp_state(m) is not None]


def all_sharded_parameters() -> Iterator[torch.Tensor]:
    """Every parameter that FSDP2 manages in this process, in its sharded form."""
    for module in all_fsdp_modules():
        for group in state_groups(fsdp_state(module)):
            yield from (p.sharded_param for p in group_params(group) if hasattr(p, "sharded_param"))


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(name, module)`` of the root and all in it, in the order of its method of that name, which a class may have
    replaced by one that raises or hides something."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen or not isinstance(module, nn.Module):
            continue
        seen.add(id(module))
        yield name, module
        dot = f"{name}." if name else ""
        waiting += [(f"{dot}{key}", child) for key, child in reversed(list(module._modules.items()))]


def fsdp_states(root: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """``(name, module, state)`` of each distinct FSDPState under the root."""
    if fsdp_module("_fsdp_state") is None:
        return
    seen: set[int] = set()
    for name, module in named_modules(root):
        state = fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield name, module, state


def state_groups(state: Any) -> list[Any]:
    """The FSDPParamGroups of a state: a list since torch 2.12, one or none before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        return [] if single is None else [single]
    return list(groups)


def group_params(group: Any) -> list[Any]:
    """The FSDPParams of a group."""
    return list(getattr(group, "fsdp_params", ()))


def module_of(part: Any) -> nn.Module | None:
    """The module that an FSDPState, FSDPParamGroup or FSDPParam belongs to, None for anything else."""
    info = getattr(part, "_module_info", None)
    module = getattr(info, "module", None)
    if module is None:
        modules = getattr(part, "_modules", None) or getattr(part, "modules", None)
        module = modules[0] if isinstance(modules, tuple) and modules else None
    return module if isinstance(module, nn.Module) else None


def param_slots(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """Every module slot that holds this parameter, the first one first (more than one: tied)."""
    info = fsdp_param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def is_plain(record: Any) -> bool:
    """Whether both handles on a parameter's bytes are plain tensors, and no subclass with ways of its own (float8)."""
    handles = (local_tensor(record.sharded_param), getattr(record, "_sharded_param_data", None))
    return all(type(handle) is torch.Tensor for handle in handles)


def sharded() -> Any | None:
    """ShardedState.SHARDED."""
    return getattr(getattr(fsdp_module("_fsdp_param"), "ShardedState", None), "SHARDED", None)


def enum_name(member: Any) -> str | None:
    """``TrainingState.POST_BACKWARD`` -> ``"post_backward"``."""
    name = getattr(member, "name", None)
    return name.lower() if isinstance(name, str) else None


def group_mesh(group: Any) -> Any | None:
    """The device mesh of a group."""
    return getattr(getattr(group, "mesh_info", None), "mesh", None)


def policy_of(group: Any) -> Any | None:
    """The offload policy of a group."""
    return getattr(group, "offload_policy", None)


def is_cpu_offload(policy: Any) -> bool:
    """Whether this is CPUOffloadPolicy (or a subclass)."""
    module = fsdp_module("_fsdp_api") or loaded("torch.distributed.fsdp")
    cls = getattr(module, "CPUOffloadPolicy", None)
    return cls is not None and isinstance(policy, cls)


def lazy_init_state(state: Any) -> str:
    """ "no", "done", or "unfinished": the root mark is set, yet a parameter never got its dtypes."""
    if getattr(state, "_is_root", None) is None:
        return "no"
    for group in state_groups(state):
        # Lazy init goes through a group's parameters in order, so the last one tells for all.
        params = getattr(group, "fsdp_params", ())
        if params and not hasattr(params[-1], "param_dtype"):
            return "unfinished"
    return "done"


def training_state(part: Any) -> str:
    """Of which pass an FSDPState or FSDPParamGroup believes to be in the middle: "idle", "forward", "pre_backward" or
    "post_backward"; a state and its groups need not agree after an exception."""
    return enum_name(getattr(part, "_training_state", None)) or "idle"


def backward_pending(state: Any) -> bool:
    """Whether the root's final backward callback is marked as queued."""
    return bool(getattr(getattr(state, "_state_ctx", None), "post_backward_final_callback_queued", False))


def backward_running() -> bool:
    """Whether autograd is running a backward pass in this thread right now."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def backward_elsewhere() -> bool:
    """Whether another thread is in a backward pass that this one has no part in. Its engine puts gradients into their
    parameters without Python's lock: who reads ``.grad`` meanwhile may find memory that is free already."""
    if backward_running():
        return False
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # a frame that holds itself would live on, and all that it leads to
    for innermost in frames.values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_name == "_engine_run_backward":  # torch/autograd/graph.py, since 2.3
                return True
            frame = frame.f_back
    return False
