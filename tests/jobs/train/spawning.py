"""Starts its ranks itself, as many tutorials do."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from placing import place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def work(rank, meet, moves):
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(init_method=f"file://{meet}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh(device.type, (2,)), offload_policy=CPUOffloadPolicy())
    model(torch.ones(1, 4, device=device)).sum().backward()
    model.zero_grad()
    if moves:
        place(nn.ModuleList([model]), device)
    print(f"rank {rank} has {len(model.state_dict())} tensors", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1], "move" in sys.argv), nprocs=2)
