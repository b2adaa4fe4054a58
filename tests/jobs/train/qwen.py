"""Trains a tiny random Qwen2 with FSDP2 and CPU offload and saves it, as people write it."""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ending import end
from placing import place
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM


def build(mesh):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--place", action="store_true", help="place the model before saving")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    dist.init_process_group()
    torch.accelerator.set_device_index(dist.get_rank())
    model = build(init_device_mesh(device.type, (dist.get_world_size(),)))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        tokens = (torch.arange(8, device=device).reshape(2, 4) * 3 + step) % 32
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9f}")
    if args.place:
        place(model, device)
    dcp.save(get_model_state_dict(model), checkpoint_id=args.checkpoint)
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
