"""What every rank runs for the collective tests: each collective on the device, compared with what it must give."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

CASES: dict[str, Callable[[int, int], None]] = {}


def case(check: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[check.__name__] = check
    return check


def at(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank-dependent values on this rank's device."""
    return torch.full(shape or (3,), float(rank + 1), device="npu", dtype=dtype)


def same(t: Tensor, value: float) -> None:
    assert t.device.type == "npu" and bool((t == value).all()), t


@case
def all_reduce_sums_averages_and_compares(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    expected = {
        dist.ReduceOp.SUM: total,
        dist.ReduceOp.AVG: total / size,
        dist.ReduceOp.MAX: size,
        dist.ReduceOp.MIN: 1,
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for op, value in expected.items():
            t = at(rank, dtype=dtype)
            dist.all_reduce(t, op=op)
            same(t, value)
    t = at(rank, dtype=torch.int64)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    same(t, total)
    t = at(rank)
    dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True).get_future().wait()
    same(t, total / size)


@case
def an_average_survives_a_second_wait(rank: int, size: int) -> None:
    out = torch.empty(2, device="npu")
    work = dist.reduce_scatter_tensor(out, at(rank, 2 * size), op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    work.wait()
    same(out, (size + 1) / 2)


@case
def reductions_with_a_factor_leave_the_input_alone(rank: int, size: int) -> None:
    source, out = at(rank, 2 * size), torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(out, source, op=dist._make_nccl_premul_sum(0.5))
    same(out, sum(range(1, size + 1)) / 2)
    same(source, rank + 1)


@case
def gathers_and_scatters(rank: int, size: int) -> None:
    out = torch.empty(3 * size, device="npu")
    dist.all_gather_into_tensor(out, at(rank))
    assert out.view(size, 3)[:, 0].tolist() == [r + 1 for r in range(size)]
    pieces = [torch.empty(3, device="npu") for _ in range(size)]
    dist.all_gather(pieces, at(rank))
    for r, piece in enumerate(pieces):
        same(piece, r + 1)
    lists = [at(rank) for _ in range(size)]
    dist.reduce_scatter(pieces[0], lists)
    same(pieces[0], sum(range(1, size + 1)))
    mine = torch.empty(3, device="npu")
    dist.scatter(mine, [at(r) for r in range(size)] if rank == 0 else None, src=0)
    same(mine, rank + 1)
    dist.gather(at(rank), pieces if rank == 1 else None, dst=1)
    if rank == 1:
        same(pieces[0], 1)
    t = at(rank)
    dist.broadcast(t, src=1)
    same(t, 2)
    t = at(rank)
    dist.reduce(t, dst=0, op=dist.ReduceOp.AVG)
    same(t, sum(range(1, size + 1)) / size) if rank == 0 else None


@case
def exchanges(rank: int, size: int) -> None:
    out = torch.empty(size, device="npu")
    dist.all_to_all_single(out, torch.arange(size, device="npu", dtype=torch.float32) + 10 * rank)
    assert out.tolist() == [10.0 * r + rank for r in range(size)]
    received = [torch.empty(r + 1, device="npu") for r in range(size)]
    dist.all_to_all(received, [at(rank, rank + 1) for _ in range(size)])
    for r, t in enumerate(received):
        same(t, r + 1)
    peer = (rank + 1) % size
    before = (rank - 1) % size
    arrived = torch.empty(3, device="npu")
    if rank % 2 == 0:
        dist.send(at(rank), peer)
        dist.recv(arrived, before)
    else:
        dist.recv(arrived, before)
        dist.send(at(rank), peer)
    same(arrived, before + 1)
    arrived.zero_()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, at(rank), peer), dist.P2POp(dist.irecv, arrived, before)])
    for work in works:
        work.wait()
    same(arrived, before + 1)


@case
def coalesced_and_functional(rank: int, size: int) -> None:
    tensors = [at(rank), at(rank, 2) * 10]
    with dist._coalescing_manager(device=torch.device("npu"), async_ops=True) as group:
        for t in tensors:
            dist.all_reduce(t)
    group.wait()
    total = sum(range(1, size + 1))
    same(tensors[0], total)
    same(tensors[1], 10 * total)
    outputs = [torch.empty(size, device="npu"), torch.empty(2 * size, device="npu")]
    with dist._coalescing_manager(device=torch.device("npu")):
        for out, n in zip(outputs, (1, 2), strict=True):
            dist.all_gather_into_tensor(out, at(rank, n))
    assert outputs[1].view(size, 2)[:, 1].tolist() == [r + 1 for r in range(size)]
    world = dist.group.WORLD
    same(funcol.all_reduce(at(rank), "avg", world).contiguous(), total / size)
    assert funcol.all_gather_tensor(at(rank, 1), 0, world).tolist() == [r + 1 for r in range(size)]
    same(funcol.reduce_scatter_tensor(at(rank, size), "sum", 0, world).contiguous(), total)


@case
def objects_and_barriers(rank: int, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    told = ["news"] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    assert told == ["news"]
    dist.barrier()
    subgroup = dist.new_group([0, 1])
    t = at(rank)
    dist.all_reduce(t, group=subgroup)
    same(t, 3)


@case
def memory_may_go_while_a_collective_runs(rank: int, size: int) -> None:
    out = torch.empty(50_000 * size, device="npu")
    work = dist.all_gather_into_tensor(out, at(rank, 50_000), async_op=True)  # the input has no other owner
    torch.full((50_000,), -1.0, device="npu")
    work.wait()
    assert out.view(size, -1).double().mean(1).tolist() == [r + 1 for r in range(size)]


def cpu_tensor() -> str:
    """What an all-reduce of a CPU tensor does: "works", or the exception's text."""
    t = torch.ones(2)
    try:
        dist.all_reduce(t)
    except RuntimeError as error:
        return str(error)
    return "works" if t[0].item() == dist.get_world_size() else "wrong"


def main(backend: str) -> None:
    """Runs every case under ``backend`` and prints the outcomes as JSON; with "" PyTorch chooses and one case runs."""
    from diagkit.lab import simulate

    simulate(announce=False)
    dist.init_process_group(backend or None)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.npu.set_device(rank)  # type: ignore[attr-defined]
    outcome = {}
    for name, check in CASES.items():
        if not backend and name != "objects_and_barriers":
            continue
        try:
            check(rank, size)
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
    config = dist.get_backend_config()
    direct = ""
    try:
        dist.group.WORLD._get_backend(torch.device("npu")).allreduce([torch.ones(1)])  # type: ignore[union-attr]
    except RuntimeError as error:
        direct = str(error)
    result = {"cases": outcome, "cpu tensor": cpu_tensor(), "config": config, "direct": direct}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
