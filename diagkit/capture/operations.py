"""Which calls are observed, and where PyTorch keeps the functions that are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diagkit import torch_internals as internals


@dataclass(frozen=True, slots=True)
class Operation:
    """One observed call."""

    name: str  # as people say it: "Module.state_dict"
    scope: str  # what it can change: "model", "states", "structure", "nothing"
    notable: bool = True  # a moment even when nothing changed; otherwise only when something did
    looks: bool = False  # only reads: it moves nothing itself, though a call inside it may
    full: bool = False  # for recorders of detail "full" alone
    writes: bool = False  # into parameters
    renews: bool = False  # may give parameters other storages, unasked

    def covers(self, inner: Operation) -> bool:
        """Whether who hears of a call of this needs not hear of one inside it: only a move is told inside all but a
        move, and what only detail "full" tells hides nothing that is told at any."""
        if inner is APPLY:
            return self is APPLY
        return self.scope != "nothing" if inner.full else not self.full


def _sharded(group: Any, *_: Any) -> bool:
    """A group is told to shard its parameters again also where they are."""
    return bool(getattr(group, "is_sharded", False))


def _at_rest(module: Any, *_: Any) -> bool:
    """Every move of an FSDP module shards it first, which it mostly is."""
    try:
        return all(getattr(group, "is_sharded", True) for group in internals.state_groups(internals.fsdp_state(module)))
    except Exception:  # asked in the job's own call: what goes wrong here is told by who reads the groups
        return False


def _initialised(state: Any, *_: Any) -> bool:
    """Lazy init is called at every forward of every FSDP module and returns at once after the first."""
    return getattr(state, "_is_root", None) is not None


APPLY = Operation("Module._apply", "model")
LOAD = Operation("Module.load_state_dict", "model", writes=True)
RESET = Operation("FSDPParam.reset_sharded_param", "model", notable=False)
BACKWARD_END = Operation("backward end", "nothing", notable=False)
STEP = Operation("Optimizer.step", "states", notable=False, writes=True)
SHARD = Operation("fully_shard", "structure", notable=False)
BUILD = Operation("Optimizer.__init__", "nothing", notable=False)
BACKWARD = Operation("backward", "nothing", notable=False, full=True)
UNSHARD = Operation("unshard", "model", notable=False, full=True)
RESHARD = Operation("reshard", "model", notable=False, full=True)
REDUCE = Operation("reduce gradients", "model", notable=False, full=True)

#: Names of those that only read.
LOOKS = frozenset(("Module.state_dict", "Optimizer.state_dict", "get_model_state_dict", "get_optimizer_state_dict"))

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

#: Where the job has not imported the module yet there is nothing to observe in it; `hooks.install` looks again.
Place = tuple[str, str, str, Operation, Callable[..., bool] | None]
PLACES: tuple[Place, ...] = (
    ("torch.nn.modules.module", "Module", "_apply", APPLY, None),
    ("torch.nn.modules.module", "Module", "state_dict", Operation("Module.state_dict", "model", looks=True), None),
    (
        "torch.nn.modules.module",
        "Module",
        "load_state_dict",
        Operation("Module.load_state_dict", "model", writes=True),
        None,
    ),
    ("torch.optim.optimizer", "Optimizer", "state_dict", Operation("Optimizer.state_dict", "states", looks=True), None),
    ("torch.optim.optimizer", "Optimizer", "__init__", BUILD, None),
    ("torch.optim.optimizer", "Optimizer", "load_state_dict", Operation("Optimizer.load_state_dict", "states"), None),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule", "_apply", APPLY, None),
    (
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "FSDPModule",
        "reshard",
        Operation("FSDPModule.reshard", "groups", notable=False),
        _at_rest,
    ),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam", "reset_sharded_param", RESET, None),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "__init__", SHARD, None),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState",
        "_lazy_init",
        Operation("first forward", "model", renews=True),
        _initialised,
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState",
        "_root_post_backward_final_callback",
        BACKWARD_END,
        None,
    ),
    # The public functions call these by name, also where they were imported by name before.
    (
        "torch.distributed.checkpoint.state_dict",
        "",
        "_get_model_state_dict",
        Operation("get_model_state_dict", "model", looks=True),
        None,
    ),
    (
        "torch.distributed.checkpoint.state_dict",
        "",
        "_get_optim_state_dict",
        Operation("get_optimizer_state_dict", "states", looks=True),
        None,
    ),
    (
        "torch.distributed.checkpoint.state_dict",
        "",
        "_load_model_state_dict",
        Operation("set_model_state_dict", "model", writes=True),
        None,
    ),
    (
        "torch.distributed.checkpoint.state_dict",
        "",
        "_load_optim_state_dict",
        Operation("set_optimizer_state_dict", "states"),
        None,
    ),
    (
        "torch.distributed.checkpoint.state_dict_saver",
        "",
        "_save_state_dict",
        Operation("dcp.save", "everything"),
        None,
    ),
    (
        "torch.distributed.checkpoint.state_dict_loader",
        "",
        "_load_state_dict",
        Operation("dcp.load", "everything", writes=True),
        None,
    ),
    ("diagkit.remedy.healing", "", "mend_all", Operation("dk.heal", "everything"), None),
    # `torch.autograd.backward` and `Tensor.backward` call it by this name.
    ("torch.autograd", "", "_engine_run_backward", BACKWARD, None),
    (_GROUP, "FSDPParamGroup", "_to_unsharded", UNSHARD, None),
    (_GROUP, "FSDPParamGroup", "_to_sharded", RESHARD, _sharded),
    (_GROUP, "FSDPParamGroup", "_to_sharded_post_forward", RESHARD, None),
    (_GROUP, "FSDPParamGroup", "post_backward", REDUCE, None),
)
