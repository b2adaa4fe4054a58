"""The ways in which diagkit watches a job, one beside the other, and what each of them must leave as it was."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn

import diagkit as dk
from diagkit.capture import hooks
from diagkit.run.door import open_door
from diagkit.run.options import Options

#: "bare" is no way: what all others are held against.
WAYS = ("bare", "phases", "transitions", "full", "attach", "auto", "bare again")


class Trainer(Protocol):
    """What a job makes: an engine whose operations can be attached to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


#: Opens a phase, where the way has phases of the user's own.
Phase = Callable[[str], contextlib.AbstractContextManager[None]]


def watched(way: str, folder: pathlib.Path, make: Callable[[], Trainer], work: Callable[[Any, Phase], Any]) -> Any:
    """What ``work`` returns of the trainer, while it is watched in this way."""
    phase: Phase = lambda name: contextlib.nullcontext()  # noqa: E731
    with contextlib.ExitStack() as stack:
        if way == "auto":
            door = open_door(Options(out=str(folder), detail="full"), explains=True)
            assert door is not None
            stack.callback(door.close)
        trainer = make()
        if way in ("phases", "transitions", "full"):
            phase = stack.enter_context(dk.record(trainer.model, trainer.optimizer, out=folder, detail=way)).phase
        elif way == "attach":
            stack.enter_context(dk.attach(trainer, out=folder, detail="full"))
        return work(trainer, phase)


def observed() -> dict[tuple[str, str, str], object]:
    """What is in each place that is patched while somebody records; all of them are imported with this module."""
    hooks.install()
    hooks.uninstall()
    return {key: vars(patch.owner)[patch.name] for key, patch in hooks._patches.items()}


def left_behind(before: dict[tuple[str, str, str], object]) -> list[str]:
    """What a recording has left in the process."""
    left = [".".join(key) for key, patch in hooks._patches.items() if vars(patch.owner)[patch.name] is not before[key]]
    left += ["a listener"] if hooks._listeners else []
    left += ["a hook of torch's"] if hooks._handles else []
    left += ["a call under way"] if getattr(hooks._here, "call", None) is not None else []
    return left


def belongings() -> tuple[int, int]:
    """Open descriptors and running threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()
