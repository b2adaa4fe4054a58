"""Fifty steps on every rank, with a checkpoint saved and loaded on the way: once bare, once recorded.

Prints digests of everything that the job computed; the tests compare them bit by bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from recorder_world import begin, end, sharded, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import diagkit as dk

STEPS, SAVED_AT, LOADED_AT = 50, 20, 30


def digest(value: object) -> str:
    """Of every bit of nested tensors, with their names, types, shapes and devices."""
    found = hashlib.sha256()
    for line in _lines("", value):
        found.update(line)
    return found.hexdigest()


def _lines(name: str, value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _lines(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _lines(f"{name}.{number}", item)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield f"{name} {value.device} {local.device} {value.dtype} {tuple(value.shape)}".encode()
        yield local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    else:
        yield f"{name} {value!r}".encode()


def train(folder: pathlib.Path, recorded: bool, detail: str = "transitions") -> dict[str, Any]:
    model = sharded(seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recording: Any = (
        dk.record(model, optimizer, out=folder / "trace", detail=detail) if recorded else contextlib.nullcontext()
    )
    losses = []
    with recording as rec:
        phase = rec.phase if recorded else lambda name: contextlib.nullcontext()
        for step in range(STEPS):
            with phase("train"):
                losses.append(train_step(model, optimizer, step).item().hex())
            if step == SAVED_AT:
                with phase("save"):
                    save(model, optimizer, folder / "checkpoint")
            if step == LOADED_AT:
                with phase("load"):
                    load(model, optimizer, folder / "checkpoint")
        with phase("export"):
            exported = {
                name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in model.state_dict().items()
            }
        save(model, optimizer, folder / "last")
    files = {
        f"{place}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for place in ("checkpoint", "last")
        for file in sorted((folder / place).glob("*.distcp"))
    }
    return {
        "losses": losses,
        "weights": digest(dict(model.named_parameters())),
        "gradients": digest([parameter.grad for parameter in model.parameters()]),
        "buffers": digest(dict(model.named_buffers())),
        "optimizer": digest(optimizer.state_dict()),
        "exported": digest(exported),
        "files": files,
        "metadata": {place: metadata(folder / place) for place in ("checkpoint", "last")},
        "random": digest([torch.get_rng_state(), torch.npu.get_rng_state()]),
    }


def metadata(folder: pathlib.Path) -> str:
    """Of what a checkpoint says of itself, less its own path and number."""
    return repr(sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: pathlib.Path) -> None:
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(states, checkpoint_id=str(folder))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: pathlib.Path) -> None:
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(states, checkpoint_id=str(folder))
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"])


def main(folder_name: str) -> None:
    begin()
    folder = pathlib.Path(folder_name)
    told = {
        "bare": train(folder / "bare", recorded=False),
        "recorded": train(folder / "recorded", recorded=True),
        "full": train(folder / "full", recorded=True, detail="full"),
        "bare_again": train(folder / "bare_again", recorded=False),
    }
    end()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
