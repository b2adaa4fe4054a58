"""Code that drives metadata and bytes apart, in a file of its own: the line that a finding must name is in here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


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


# ---- code that leaves every device as it should be


def cast_through_data(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def exchange_the_local_tensors(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        local = parameter._local_tensor  # type: ignore[attr-defined]
        parameter._local_tensor = (local * factor).to(local.device)  # type: ignore[attr-defined]


def put_into_the_slot(module: nn.Module, factor: float) -> None:
    module.weight = nn.Parameter(module.weight.detach() * factor)  # type: ignore[operator, union-attr]


def share_with_workers(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter._local_tensor.share_memory_()  # type: ignore[attr-defined]


def move_the_states_underneath(optimizer: torch.optim.Optimizer, device: str) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                value._local_tensor = value._local_tensor.to(device)


class FactoryOptimizer(torch.optim.Optimizer):
    """Momentum whose state is built from the shard alone, as low-bit optimizers once built theirs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "m" not in state:
                shard = torch.zeros_like(parameter.to_local())
                state["m"] = DTensor.from_local(shard, parameter.device_mesh, parameter.placements)
            state["m"].add_(parameter.grad)
            parameter.add_(state["m"], alpha=-0.01)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def load_by_assignment(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state, assign=True)


def wrap(model: nn.Module, parts: list[nn.Module], mesh: DeviceMesh) -> None:
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
    buffers_to_device(model, "npu")


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def train(bench: Any) -> None:
    bench.optimizer.zero_grad()
    loss = bench.loss()
    loss.backward()
    bench.optimizer.step()


def evaluate(bench: Any) -> None:
    with torch.no_grad():
        bench.loss()


def send(weights: Any) -> int:
    count = 0
    for _, tensor in weights:
        torch.distributed.broadcast(tensor, src=0)
        count += 1
    return count


def stage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cuda")


def continue_a_text(bench: Any) -> torch.Tensor:
    device = next(bench.model.parameters()).device
    tokens = torch.zeros(2, 6, dtype=torch.long, device=device)
    with torch.no_grad():
        logits = bench.model(tokens)
    return torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)


def add_a_bias(model: nn.Module) -> None:
    model.get_submodule("head").bias = nn.Parameter(torch.zeros(37))


def evaluate_and_step(bench: Any) -> None:
    bench.loss().backward()
    with torch.no_grad():
        bench.loss()
    bench.optimizer.step()


def read_a_parameter(model: nn.Module) -> torch.Tensor:
    return model.get_submodule("embed").weight.full_tensor()  # type: ignore[operator, union-attr]


def call_a_child(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model.get_submodule("embed")(tokens)  # type: ignore[no-any-return]


def give_memory(model: nn.Module, device: str) -> None:
    model.to_empty(device=device)


def stage_to_host(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", non_blocking=True) for name, tensor in weights.items()}


def checksum(weights: dict[str, torch.Tensor]) -> float:
    total = 0.0
    for tensor in weights.values():
        total += float(tensor.sum())
    return total


def park(model: nn.Module) -> None:
    model.to("cpu", non_blocking=True)


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to_local().clone() for name, tensor in model.state_dict().items()}
