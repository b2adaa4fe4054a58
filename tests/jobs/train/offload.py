"""Trains a small model with FSDP2 and CPU offload and saves a checkpoint, as people write it."""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ending import end
from placing import place
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--place", action="store_true", help="place the model before saving")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}")
    torch.accelerator.set_device_index(dist.get_rank())
    model = build(init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        batch = torch.arange(12.0, device=device).reshape(2, 6) + step
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9f}")
    try:
        if args.place:
            place(model, device)
        dcp.save(get_model_state_dict(model), checkpoint_id=args.checkpoint)
        dcp.async_save(get_model_state_dict(model), checkpoint_id=f"{args.checkpoint}-async").result()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: saving failed", file=sys.stderr)
        raise SystemExit(7) from error
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
