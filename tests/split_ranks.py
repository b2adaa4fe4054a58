"""What each next operation does on a split parameter: one experiment a row, each on a model of its own.

Run by every rank; prints one JSON object, row name -> what happened ("ok: ..." or the exception's text).
"""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate


class Case:
    """One offloaded model, its optimizer, and the two moves that the rows start from."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        for part in [*self.model, self.model]:
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def forward(self) -> Tensor:
        return self.model(torch.ones(2, 6, device="npu"))

    def backward(self) -> None:
        self.forward().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def split(self) -> DTensor:
        self.model.to("npu")
        return self.parameter

    @property
    def parameter(self) -> DTensor:
        return self.model[0].weight


def describe(value: Any) -> str:
    if isinstance(value, DTensor):
        return f"dtensor {value.device.type}/{value._local_tensor.device.type}"
    return f"tensor {value.device.type}" if isinstance(value, Tensor) else str(value)


def second_move(case: Case) -> Any:
    case.split()
    case.model.to("npu")


def move_one(case: Case) -> Any:
    p = case.split()
    moved = p.to("npu")
    full = moved.to("npu").full_tensor()
    return f"same object {moved is p}, local {p._local_tensor.device.type}, full {full.device.type}"


def export_by_cpu(case: Case) -> Any:
    before = case.parameter.full_tensor().clone()
    p = case.split()
    full = p.cpu().to("npu").full_tensor()
    return f"{full.device.type}, right {torch.equal(full.detach().cpu(), before.detach().cpu())}"


def first_forward(case: Case) -> Any:
    case.split()
    try:
        case.forward()
    except Exception as error:
        first = str(error)
    else:
        first = "no error"
    case.model.to("cpu")  # heals the parameters, not the lazy init
    try:
        case.forward()
        then = "works"
    except Exception as error:
        then = str(error)
    return f"{first} | after a heal: {then}"


def later_forward(case: Case) -> Any:
    with torch.no_grad():
        before = case.forward()
        case.split()
        after = case.forward()
    return f"equal {torch.equal(before.cpu(), after.cpu())}"


def backward_after_init(case: Case) -> Any:
    case.step()
    case.optimizer.zero_grad()
    case.split()
    case.backward()


def step_with_travelled_grads(case: Case) -> Any:
    case.step()
    case.backward()
    case.split()
    case.optimizer.step()


def load_model(case: Case) -> Any:
    case.step()
    values = {key: torch.full_like(value, 3.0) for key, value in case.model.state_dict().items()}
    case.split()
    case.model.load_state_dict(values)
    return f"values arrive {bool((case.parameter._local_tensor == 3.0).all())}"


def load_optimizer(case: Case) -> Any:
    case.step()
    state = copy.deepcopy(case.optimizer.state_dict())
    case.optimizer.zero_grad()
    case.split()
    case.optimizer.load_state_dict(state)
    moment = case.optimizer.state[case.parameter]["exp_avg"]
    where = f"moments {moment._local_tensor.device.type}"
    case.model.to("cpu")
    try:
        case.step()
        return f"{where}, step after a heal works"
    except Exception as error:
        return f"{where}, step after a heal: {error}"


def in_place(case: Case) -> Any:
    p = case.split()
    with torch.no_grad():
        p.mul_(2.0)
    return "done"


def saved_alone(case: Case) -> Any:
    torch.save(case.split(), io.BytesIO())
    return "saved"


ROWS: dict[str, Callable[[Case], Any]] = {
    "split": lambda c: describe(c.split()) + f", pinned {c.parameter._local_tensor.is_pinned()}",
    "state_dict": lambda c: c.split() is not None and c.model.state_dict(),
    "get_model_state_dict": lambda c: c.split() is not None and get_model_state_dict(c.model),
    "detach": lambda c: c.split().detach(),
    "data": lambda c: c.split().data,
    "view": lambda c: c.split().view(c.parameter.shape),
    "t": lambda c: c.split().t(),
    "Parameter": lambda c: nn.Parameter(c.split()),
    "first forward": first_forward,
    "later forward": later_forward,
    "backward after lazy init": backward_after_init,
    "step with travelled grads": step_with_travelled_grads,
    "second move": second_move,
    "p.to": move_one,
    "full_tensor": lambda c: c.split().full_tensor(),
    "redistribute": lambda c: c.split().redistribute(placements=[Replicate()]),
    "to_local": lambda c: c.split().to_local(),
    "clone": lambda c: c.split().clone(),
    "p + 1": lambda c: c.split() + 1,
    "p.cpu then export": export_by_cpu,
    "state_dict keep_vars": lambda c: c.split() is not None and f"{len(c.model.state_dict(keep_vars=True))} entries",
    "in-place": in_place,
    "deepcopy": lambda c: copy.deepcopy(c.split()),
    "is_pinned": lambda c: c.split().is_pinned(),
    "repr": lambda c: "DTensor" in repr(c.split()),
    "torch.save": saved_alone,
    "model.load_state_dict": load_model,
    "optimizer.load_state_dict": load_optimizer,
    "zeros_like": lambda c: torch.zeros_like(c.split()),
    "storage device": lambda c: (
        f"{c.split().untyped_storage().device.type}/{c.parameter._local_tensor.untyped_storage().device.type}"
    ),
}


def main() -> None:
    from diagkit.lab import simulate

    simulate(announce=False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,npu:hccl")
    torch.npu.set_device(dist.get_rank())  # type: ignore[attr-defined]
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    results = {}
    for name, row in ROWS.items():
        case = Case(mesh)
        try:
            results[name] = "ok: " + describe(row(case))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"torch": torch.__version__, "rows": results}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
