"""Compiled models, recorded before they are compiled and after, and what the compiler makes of them.

FSDP2 on the CPU, one rank: the simulated accelerator has no kernels that a compiler could call. Prints digests of what
was computed and Dynamo's own counts.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.utils
import torch.distributed as dist
from harmless_training import digest
from torch import nn
from torch.distributed.fsdp import fully_shard
from ways import WAYS, Phase, left_behind, observed, watched

from diagkit.trace import open_trace

STEPS = 3


class Trainer:
    """A model, ``sharded`` or plain, of which one ``part`` ("layers", "model", "step", "save") is compiled."""

    def __init__(self, part: str, sharded: bool, backend: str) -> None:
        torch.manual_seed(5)
        self.model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        if sharded:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        self.step: Callable[[], Any] = self.optimizer.step
        if part == "layers":
            for layer in self.model:
                layer.compile(backend=backend)
        elif part == "model":
            self.forward = torch.compile(self.model, backend=backend)
        elif part == "step":
            self.step = torch.compile(self.optimizer.step, backend=backend)
        else:
            self.save = torch.compile(self.save, backend=backend)  # type: ignore[method-assign]

    def train_batch(self, step: int) -> str:
        """The loss, exactly."""
        batch = torch.rand(4, 6, generator=torch.Generator().manual_seed(step))
        loss = self.forward(batch).square().sum()
        loss.backward()
        self.step()
        self.optimizer.zero_grad()
        return loss.item().hex()

    def save(self) -> dict[str, Any]:
        """The model's states, after it was moved and registered something."""
        self.model.double().float()
        self.model.register_buffer("count", torch.ones(1))
        return dict(self.model.state_dict())


def work(trainer: Trainer, phase: Phase) -> dict[str, Any]:
    """Steps and a save."""
    with phase("train"):
        losses = [trainer.train_batch(step) for step in range(STEPS)]
    with phase("save"):
        saved = digest(trainer.save())
    return {
        "losses": losses,
        "results": [*losses, saved, digest(trainer.optimizer.state_dict())],
        "compiler": compiler(),
    }


def compiler() -> dict[str, Any]:
    """What Dynamo has done since its counters were cleared."""
    counters = torch._dynamo.utils.counters
    return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "recompiles", "recompile_limit")}


def afresh() -> None:
    """Forgets all that was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def turns(make: Callable[[], Trainer], folder: pathlib.Path, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """One trainer, watched in one way after the other; what the compiler had done after each."""
    afresh()
    trainer = make()
    return [watched(way, folder / str(turn), lambda: trainer, work)["compiler"] for turn, way in enumerate(ways)]


SETUPS: dict[str, Callable[[], Trainer]] = {
    "layers under FSDP2": functools.partial(Trainer, "layers", True, "aot_eager"),
    "whole model under FSDP2": functools.partial(Trainer, "model", True, "eager"),
    "whole model": functools.partial(Trainer, "model", False, "aot_eager"),
    "optimizer step": functools.partial(Trainer, "step", False, "eager"),
    "move and save": functools.partial(Trainer, "save", False, "eager"),
}


def main(folder_name: str) -> None:
    dist.init_process_group("gloo")
    folder = pathlib.Path(folder_name)
    before = observed()
    found: dict[str, dict[str, Any]] = {}
    for number, (name, make) in enumerate(SETUPS.items()):
        told = found[name] = {}
        for way in WAYS[:-1]:
            afresh()
            place = folder / f"{number}-{way}"
            told[way] = watched(way, place, make, work)
            told[way]["left"] = left_behind(before)
            traces = [open_trace(file.parent)[0] for file in place.rglob("rank-*.jsonl")]
            told[way]["trouble"] = [text for trace in traces for text in (*trace.troubles, *trace.problems)]
        told["turns"] = {
            name: turns(make, folder / f"{number}-{name}", ways)
            for name, ways in (("bare", ("bare",) * 4), ("recorded", ("bare", "full", "bare", "transitions")))
        }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
