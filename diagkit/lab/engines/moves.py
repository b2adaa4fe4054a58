"""The whole-model and optimizer moves that both engines share, with nothing that asks whether a move is wise.

Rules of this module: a move does what its name says, unconditionally. Whether it should happen is for the engines to
decide, where the guards stand (`guards.py`). Names follow the field: ``load_*`` goes to the accelerator, ``offload_*``
to the CPU.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from diagkit import torch_internals
from diagkit.torch_internals import writers

__all__ = [
    "empty_cache",
    "load_model_to_device",
    "load_optimizer",
    "offload_model_to_cpu",
    "offload_optimizer",
    "offload_veomni_model_to_cpu",
]


def empty_cache(device: str) -> None:
    """Return cached device memory, where the device keeps a cache."""
    release = getattr(torch.get_device_module(device), "empty_cache", None)
    if release is not None:
        release()


def load_model_to_device(module: nn.Module, device: str) -> None:
    """Move every parameter and buffer to the accelerator.

    Under ``CPUOffloadPolicy(pin_memory=True)`` this is what splits each parameter: FSDP takes the bytes back to pinned
    host memory and leaves the wrapper on the device (``FSDPParam.reset_sharded_param``).
    """
    module.to(device)


def offload_model_to_cpu(module: nn.Module, device: str) -> None:
    """Move every parameter and buffer to the CPU and free the device's cache."""
    module.cpu()
    empty_cache(device)


def offload_veomni_model_to_cpu(module: nn.Module, device: str) -> None:
    """VeOmni's way: first end whatever FSDP is in the middle of (every group idle, every parameter sharded)."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in torch_internals.state_groups(torch_internals.fsdp_state(part)):
                writers.set_idle(group)
            part.reshard()
    offload_model_to_cpu(module, device)


def load_optimizer(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Move every tensor of the optimizer's state to the accelerator, `step` counters included."""
    _move_optimizer(optimizer, device)


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move every tensor of the optimizer's state to the CPU."""
    _move_optimizer(optimizer, "cpu")


def _move_optimizer(optimizer: torch.optim.Optimizer, device: str) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(device)
