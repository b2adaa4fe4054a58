"""What the recorder's tests have in common: a small model under FSDP2 on the simulated accelerator."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from diagkit.lab.models import DecoderConfig, TinyDecoder


def begin() -> int:
    """Simulated accelerator and process groups for this rank, which is returned."""
    from diagkit.lab import simulate

    torch.set_num_threads(1)
    simulate()
    dist.init_process_group("cpu:gloo,npu:hccl")
    torch.npu.set_device(dist.get_rank())
    return dist.get_rank()


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


def sharded(seed: int = 0, pin: bool = True, **sizes: int | bool) -> TinyDecoder:
    """A decoder whose layers and root are sharded and offloaded; buffers on the accelerator."""
    torch.manual_seed(seed)
    model = TinyDecoder(DecoderConfig(**sizes))  # type: ignore[arg-type]
    policy = CPUOffloadPolicy(pin_memory=pin)
    for layer in model.model.layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    model.model.rotary_emb.to(device())
    return model


def device() -> torch.device:
    """This rank's simulated accelerator."""
    return torch.device("npu", torch.npu.current_device())


def tokens(step: int = 0) -> torch.Tensor:
    """A batch that is another one at each step and on each rank."""
    made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, 37, (2, 5), generator=made).to(device())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> torch.Tensor:
    """Forward, backward, clipped step; the loss."""
    batch = tokens(step)
    logits = model(batch)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
