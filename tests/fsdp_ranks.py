"""Ways to use FSDP on the simulated accelerator that real jobs have, each checked by every one of four ranks."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from diagkit.lab.models import DecoderConfig, TinyDecoder

CASES: dict[str, Callable[[], None]] = {}
CONFIG = DecoderConfig(vocab=19, hidden=12, intermediate=14, layers=1, heads=2)


def case(check: Callable[[], None]) -> Callable[[], None]:
    CASES[check.__name__] = check
    return check


def shard(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = mesh or init_device_mesh("npu", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def decoder(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return TinyDecoder(CONFIG)


def move_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.to("npu")


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    tokens = torch.arange(16).view(2, 8) % 19 + dist.get_rank() % 2
    for _ in range(steps):
        logits = model(tokens.to("npu"))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().to("npu"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def reference() -> list[float]:
    model = shard(decoder())
    move_buffers(model)
    return losses(model)


@case
def a_model_may_be_built_on_the_cpu_the_device_or_meta() -> None:
    expected = reference()
    on_device = shard(decoder().to("npu"))
    assert losses(on_device) == expected
    full = get_model_state_dict(on_device, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert (full != {}) == (dist.get_rank() == 0)
    for offload in (False, True):
        options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        model = shard(decoder("meta"), **options)
        model.to_empty(device="cpu" if offload else "npu")
        source = {k: v.clone() for k, v in decoder().state_dict().items()}
        set_model_state_dict(
            model,
            source if dist.get_rank() == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        model.reset_buffers()  # type: ignore[operator]
        move_buffers(model)
        assert losses(model) == expected


@case
def a_two_dimensional_mesh_replicates_and_shards() -> None:
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = shard(decoder(), mesh, **options)
        move_buffers(model)
        found = losses(model)
        assert all(abs(a - b) < 1e-5 for a, b in zip(found, reference(), strict=True)), (found, reference())


@case
def fsdp1_may_be_moved_by_hand() -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(decoder().to("npu"), use_orig_params=True)
    first = losses(model, 1)
    model.to("cpu")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    model.to("npu")
    assert {p.device.type for p in model.parameters()} == {"npu"}
    second = losses(model, 1)
    assert second < first and abs(first[0] - reference()[0]) < 1e-5


@case
def a_model_without_the_policy_may_be_offloaded_by_hand() -> None:
    model = shard(decoder())
    move_buffers(model)
    before = losses(model, 1)
    model.to("cpu")
    assert {(p.device.type, p._local_tensor.device.type) for p in model.parameters()} == {("cpu", "cpu")}
    model.to("npu")
    assert {(p.device.type, p._local_tensor.device.type) for p in model.parameters()} == {("npu", "npu")}
    model.state_dict()
    assert losses(model, 1) < before


@case
def activation_checkpointing_changes_nothing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = decoder()
    layer = type(model.model.layers[0])  # type: ignore[index, union-attr]
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, layer))
    model = shard(model, offload_policy=CPUOffloadPolicy())
    move_buffers(model)
    assert losses(model) == reference()


@case
def a_distributed_checkpoint_may_be_written_in_the_background() -> None:
    model = shard(decoder(), offload_policy=CPUOffloadPolicy())
    move_buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses(model, 1)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    kept = {k: v._local_tensor.clone() for k, v in state["model"].items() if isinstance(v, DTensor)}
    dcp.async_save(state, checkpoint_id=Path(shared[0])).result()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.0)
    fresh = {"model": get_model_state_dict(model)}
    dcp.load(fresh, checkpoint_id=Path(shared[0]))
    assert all(torch.equal(fresh["model"][k]._local_tensor, v) for k, v in kept.items())


@case
def deferred_copies_leave_training_right() -> None:
    from diagkit.lab import running

    simulation = running()
    assert simulation is not None
    expected = reference()
    simulation.set_deferred_copies(True)
    try:
        model = shard(decoder(), offload_policy=CPUOffloadPolicy())
        move_buffers(model)
        assert losses(model) == expected, "FSDP2 waits for its gradients' copies before the optimizer reads them"
    finally:
        torch.npu.synchronize()  # type: ignore[attr-defined]
        simulation.set_deferred_copies(False)


@case
def a_full_device_stops_an_all_gather() -> None:
    from diagkit.lab import running

    simulation = running()
    assert simulation is not None
    model = shard(decoder(), offload_policy=CPUOffloadPolicy())
    move_buffers(model)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="npu")
    rank = dist.get_rank()
    simulation.set_capacity(npu.memory_allocated(rank) + 512, device=rank)
    try:
        model(tokens)
    except torch.OutOfMemoryError as error:
        assert "NPU out of memory (simulated)" in str(error)
    else:
        raise AssertionError("the forward fitted into 512 bytes")
    finally:
        simulation.set_capacity(0)


@case
def an_empty_shard_trains_like_any_other() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)  # two rows over four ranks: two ranks hold nothing
    expected: Tensor = layer.weight.detach().clone()
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("npu", (4,)), **options)
        set_model_state_dict(model, layer.state_dict(), options=StateDictOptions(full_state_dict=True))
        model(torch.ones(1, 3, device="npu")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert torch.equal(model.weight.full_tensor().cpu(), expected - 1.0)


def main() -> None:
    """Runs every case and prints the outcomes as JSON."""
    from diagkit.lab import simulate

    simulate(announce=False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,npu:hccl")
    torch.npu.set_device(dist.get_rank())  # type: ignore[attr-defined]
    outcome = {}
    for name, check in CASES.items():
        try:
            check()
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
