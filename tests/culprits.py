"""Code that drives metadata and bytes apart, in a file of its own: the line that a finding must name is in here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def load_model_to_device(model: nn.Module, device: str) -> None:
    model.to(device)


def offload_model_to_cpu(model: nn.Module) -> None:
    model.to("cpu")


def buffers_to_device(model: nn.Module, device: str) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def move_one_child(model: nn.Module, device: str) -> None:
    model.get_submodule("layers.0.mlp").to(device)


def replace_the_local_tensors(model: nn.Module, device: str) -> None:
    for parameter in model.parameters():
        parameter._local_tensor = parameter._local_tensor.to(device)  # type: ignore[attr-defined]


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)


def forward_pass(bench: Any) -> torch.Tensor:
    return bench.loss()  # type: ignore[no-any-return]


def clip(bench: Any) -> None:
    nn.utils.clip_grad_norm_(list(bench.model.parameters()), 1.0)
