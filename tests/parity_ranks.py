"""What the parity tests run on every rank: the same training, on the CPU or on the simulated accelerator.

Prints one line of JSON: for each variant the losses and gradient norms of every step as hexadecimal floats, and a hash
of every parameter's and moment's bytes after training, so that "equal" means bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from diagkit.lab.models import DecoderConfig, TinyDecoder

STEPS = 20
LEARNING_RATE = 0.05  # large on purpose: twenty steps must move every weight far from where it began


def build(mesh: DeviceMesh, offload: str, precision: str) -> nn.Module:
    """A tied decoder with uneven shards (17 rows of 5), sharded layer by layer, under one policy."""
    torch.manual_seed(1)
    model = TinyDecoder(DecoderConfig(vocab=17, hidden=10, intermediate=13, heads=1, tie=True))
    options: dict[str, Any] = {"mesh": mesh}
    if offload != "none":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=offload == "pinned")
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    device = mesh.device_type
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    return model


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=kind == "foreach", fused=kind == "fused")


def train(mesh: DeviceMesh, variant: dict[str, str], folder: Path) -> dict[str, Any]:
    model = build(mesh, variant["offload"], variant["precision"])
    optimizer = optimizer_for(model, variant["optimizer"])
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses, norms = [], []
    for step in range(STEPS):
        if step == STEPS // 2:
            model, optimizer = through_checkpoint(mesh, variant, model, optimizer, folder)
        tokens = torch.randint(0, 17, (3, 8), generator=generator).to(mesh.device_type)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item().hex())
    return {"losses": losses, "norms": norms, **state_hashes(model, optimizer)}


def through_checkpoint(
    mesh: DeviceMesh, variant: dict[str, str], model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Saves with DCP and goes on with a model and an optimizer that only the checkpoint can have brought up to date."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    fresh = build(mesh, variant["offload"], variant["precision"])
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(7.0)
    fresh_optimizer = optimizer_for(fresh, variant["optimizer"])
    model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return fresh, fresh_optimizer


def state_hashes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def digest(tensors: list[Tensor]) -> str:
        total = hashlib.sha256()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total.update(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:16]

    parameters = list(model.parameters())
    moments = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return {"parameters": digest(parameters), "moments": digest(moments), "count": len(parameters)}


def main(device: str, folder: str, variants: str) -> None:
    """Trains each variant (optimizer/offload/precision, separated by commas) and prints the results as JSON."""
    torch.set_num_threads(1)
    if device == "npu":
        from diagkit.lab import simulate

        simulate(announce=False)
        dist.init_process_group("cpu:gloo,npu:hccl")
        torch.npu.set_device(dist.get_rank())  # type: ignore[attr-defined]
    else:
        assert torch._C._get_privateuse1_backend_name() == "privateuseone", "the plain run must not know the simulator"
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    results = {}
    for name in variants.split(","):
        variant = dict(zip(("optimizer", "offload", "precision"), name.split("/"), strict=True))
        where = Path(folder) / f"{device}-{name.replace('/', '-')}"
        results[name] = train(mesh, variant, where)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
    sys.stdout.write(json.dumps(results) + "\n")
    dist.destroy_process_group()
