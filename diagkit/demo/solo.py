"""One rank in this very process, for a notebook or a prompt: a real accelerator where there is one, else the simulated
one.

Rules of this module: it changes nothing that it does not say; asked again, it gives the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from diagkit.demo.experiments import group_names
from diagkit.errors import UsageError

__all__ = ["Solo", "start_alone"]


@dataclass(frozen=True)
class Solo:
    """Where this process computes. ``device`` is a device type; ``simulated`` says that it is one in host memory."""

    device: str
    simulated: bool
    group: str
    torch: str

    def __str__(self) -> str:
        what = (
            f"{self.device} (SIMULATED in host memory; FSDP2 and DTensor are real)" if self.simulated else self.device
        )
        return f"1 rank in this process on {what}, process group {self.group}, torch {self.torch}"

    __repr__ = __str__


_started: Solo | None = None


def start_alone(group: str | None = None) -> Solo:
    """Choose the accelerator, simulate one if none is there, and join a process group of one rank.

    Args:
        group: a backend string of ``torch.distributed``; CPU and accelerator collectives both, unless given.

    Raises:
        UsageError: a process group of another kind is up already.
        SimulatorError: no accelerator, and the simulated one cannot be built here.
    """
    global _started
    if _started is not None:
        if group not in (None, _started.group):
            raise UsageError(
                "a process has one default group", found=group, expected=_started.group, remedy="Restart the kernel"
            )
        return _started
    device, simulated = _accelerator()
    group = group or group_names(device)[0]
    if dist.is_initialized():
        raise UsageError("a process group is up already", remedy="Restart the kernel")
    torch.get_device_module(device).set_device(0)
    # One rank meets itself: a store in memory leaves neither a file nor an open port behind.
    dist.init_process_group(group, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    _started = Solo(device, simulated, group, torch.__version__)
    return _started


def _accelerator() -> tuple[str, bool]:
    from diagkit.lab import running, simulate

    if running() is None and torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type in ("npu", "cuda"):
            return found.type, False
    return simulate().name, True
