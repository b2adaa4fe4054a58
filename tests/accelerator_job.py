"""What `pytest -m accelerator` runs on a real CUDA or NPU device, and the suite on the simulated one: world size 1.

Prints one JSON object: parity of training, and each hazard with what the diagnosis said before and after its cure.

``python tests/accelerator_job.py sim|real [TRACE]``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import diagkit as dk


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 4)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.relu(self.up(x))) * self.scale)


class Bench:
    """A sharded model on the device, its optimizer, and a step."""

    def __init__(self, mesh: DeviceMesh, policy: OffloadPolicy) -> None:
        torch.manual_seed(0)
        self.device = mesh.device_type
        self.model = Net()
        for part in (self.model.up, self.model.down, self.model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    def step(self) -> float:
        x = torch.sin(torch.arange(48.0).reshape(3, 16)).to(self.device)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def codes(self) -> list[str]:
        return list(dk.inspect(self.model, self.optimizer).findings.codes)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return " ".join(str(error).split())[:300]
    return ""


def parity(device: DeviceMesh, cpu: DeviceMesh) -> dict[str, list[float]]:
    kinds = {
        "cpu": (cpu, OffloadPolicy()),
        "device": (device, OffloadPolicy()),
        "offload": (device, CPUOffloadPolicy()),
        "offload unpinned": (device, CPUOffloadPolicy(pin_memory=False)),
    }
    found = {}
    for name, (mesh, policy) in kinds.items():
        bench = Bench(mesh, policy)
        if name == "device":
            bench.model.to(device.device_type)
        found[name] = [bench.step() for _ in range(8)]
    return found


def healthy(mesh: DeviceMesh) -> dict[str, Any]:
    bench = Bench(mesh, CPUOffloadPolicy())
    bench.step()
    return {"found": bench.codes(), "after": bench.codes(), "error": error_of(bench.model.state_dict)}


def split(mesh: DeviceMesh) -> dict[str, Any]:
    bench = Bench(mesh, CPUOffloadPolicy())
    bench.step()
    bench.model.to(mesh.device_type)
    found = {"found": bench.codes(), "error": error_of(bench.model.state_dict)}
    bench.model.to("cpu")
    bench.model.scale.data = bench.model.scale.to(mesh.device_type)
    bench.step()
    return {**found, "after": bench.codes()}


def unpinned(mesh: DeviceMesh) -> dict[str, Any]:
    bench = Bench(mesh, CPUOffloadPolicy(pin_memory=False))
    bench.model.to(mesh.device_type)
    found = {"found": bench.codes(), "error": error_of(bench.step)}
    bench = Bench(mesh, CPUOffloadPolicy(pin_memory=False))
    bench.step()
    return {**found, "after": bench.codes()}


def stranded(mesh: DeviceMesh) -> dict[str, Any]:
    bench = Bench(mesh, CPUOffloadPolicy())
    bench.step()
    bench.model(torch.ones(1, 16, device=mesh.device_type)).sum().backward()
    bench.model.to(mesh.device_type)
    found = {"found": bench.codes(), "error": error_of(bench.optimizer.step)}
    bench.optimizer.zero_grad()
    bench.model.to("cpu")
    bench.model.scale.data = bench.model.scale.to(mesh.device_type)
    bench.step()
    return {**found, "after": bench.codes()}


def buffer_left(mesh: DeviceMesh) -> dict[str, Any]:
    bench = Bench(mesh, CPUOffloadPolicy())
    bench.model.scale.data = bench.model.scale.cpu()
    error = ""
    try:
        bench.step()
    except RuntimeError as raised:
        error = " ".join(str(raised).split())[:300]
        found = [f.code for f in dk.explain(raised).findings]
    else:
        found = bench.codes()
    bench.model.scale.data = bench.model.scale.to(mesh.device_type)
    bench.step()
    return {"found": found, "error": error, "after": bench.codes()}


HAZARDS: dict[str, Callable[[DeviceMesh], dict[str, Any]]] = {
    "healthy": healthy,
    "split": split,
    "unpinned": unpinned,
    "stranded": stranded,
    "buffer left": buffer_left,
}


def recorded(mesh: DeviceMesh, out: str) -> None:
    """A trace of the crash, to keep."""
    bench = Bench(mesh, CPUOffloadPolicy())
    with dk.record(bench.model, bench.optimizer, out=out, overwrite=True) as recorder:
        with recorder.phase("train"):
            bench.step()
        try:
            with recorder.phase("save"):
                bench.model.to(mesh.device_type)
                bench.model.state_dict()
        except RuntimeError:
            pass


def main() -> None:
    if sys.argv[1] == "sim":
        from diagkit.lab import simulate

        simulate()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.accelerator.set_device_index(0)
    backend = dist.get_default_backend_for_device(device)
    store = dist.HashStore()
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", store=store, rank=0, world_size=1)
    meshes = init_device_mesh(device.type, (1,)), init_device_mesh("cpu", (1,))
    answer: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "parity": parity(*meshes)}
    answer["name"] = "simulated" if sys.argv[1] == "sim" else torch.get_device_module(device).get_device_name(0)
    answer["hazards"] = {name: hazard(meshes[0]) for name, hazard in HAZARDS.items()}
    if len(sys.argv) > 2:
        recorded(meshes[0], sys.argv[2])
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
