"""The worlds that benchmarks run in: one rank on the simulated accelerator, and stacks of small blocks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from diagkit.lab import simulate

BATCH = 32


@contextlib.contextmanager
def one_rank(rank: int = 0, world: int = 1, rendezvous: str | None = None) -> Iterator[None]:
    """A process group on the simulated accelerator."""
    simulate()
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(world))
    with tempfile.TemporaryDirectory() as folder:
        where = rendezvous or os.path.join(folder, "store")
        dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{where}", rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Block(nn.Module):
    """Two linear layers around a gelu: four parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stack(parameters: int, width: int = 8, offload: bool = True, device: str = "npu") -> nn.Sequential:
    """So many parameters in blocks of four, each block and the whole sharded."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    model = nn.Sequential(*(Block(width) for _ in range(parameters // 4)))
    if not offload:
        model.to(device)
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def trained(
    parameters: int, width: int, offload: bool = True
) -> tuple[nn.Sequential, torch.optim.Optimizer, Callable[[], None]]:
    """A stack, its optimizer, and its training step, of which one is done: lazy init and optimizer states are there."""
    model = stack(parameters, width, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(BATCH, width, device="npu")

    def train() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    return model, optimizer, train
