"""This very process as a rank, alone or with other kernels: a real accelerator where there is one, else the simulated
one.

Rules of this module: it changes nothing that it does not say; asked again, it gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diagkit.demo.experiments import group_names
from diagkit.errors import UsageError

__all__ = ["Solo", "start_alone", "start_together"]


@dataclass(frozen=True)
class Solo:
    """Where this process computes. ``device`` is a device type; ``simulated`` says that it is one in host memory."""

    device: str
    simulated: bool
    group: str
    torch: str
    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        what = (
            f"{self.device} (SIMULATED in host memory; FSDP2 and DTensor are real)" if self.simulated else self.device
        )
        who = "1 rank in this process" if self.ranks == 1 else f"rank {self.rank} of {self.ranks}"
        return f"{who} on {what}\nprocess group {self.group}, torch {self.torch}"

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
    # One rank meets itself: a store in memory leaves neither a file nor an open port behind.
    return _start(0, 1, dist.HashStore, group)  # type: ignore[attr-defined]


def start_together(rank: int, ranks: int, meet: str | Path, group: str | None = None) -> Solo:
    """The same for one of several kernels of this machine that are the ranks of a job, as with ipyparallel's ``%%px``.

    Args:
        rank: this kernel's rank, and the index of its device.
        ranks: how many there are; each calls this, and waits for the others.
        meet: a file that does not exist yet, the same for all.
        group: as for :func:`start_alone`.

    Raises:
        UsageError: a process group of another kind is up already.
        SimulatorError: not enough accelerators, and the simulated one cannot be built here.
    """
    return _start(rank, ranks, lambda: dist.FileStore(str(meet), ranks), group)  # type: ignore[attr-defined]


def _start(rank: int, ranks: int, store: Callable[[], Any], group: str | None) -> Solo:
    global _started
    if _started is not None:
        if group not in (None, _started.group):
            raise UsageError(
                "a process has one default group", found=group, expected=_started.group, remedy="Restart the kernel"
            )
        return _started
    device, simulated = _accelerator(ranks)
    group = group or group_names(device)[0]
    if dist.is_initialized():
        raise UsageError("a process group is up already", remedy="Restart the kernel")
    torch.get_device_module(device).set_device(rank)
    dist.init_process_group(group, store=store(), rank=rank, world_size=ranks)
    _started = Solo(device, simulated, group, torch.__version__, rank, ranks)
    return _started


def _accelerator(ranks: int) -> tuple[str, bool]:
    from diagkit.lab import running, simulate

    if running() is None and torch.accelerator.is_available() and torch.accelerator.device_count() >= ranks:
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type in ("npu", "cuda"):
            return found.type, False
    return simulate().name, True
