"""What the attach tests run on every rank: the lab's engines, watched from outside or left alone.

Prints one JSON object; traces go to the folder that is given, one sub-folder a story.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import diagkit as dk
from diagkit.lab import simulate
from diagkit.lab.engines import EngineConfig, FSDPEngine, build_engine


def life(engine: FSDPEngine, folder: Path) -> dict[str, Any]:
    """Everything that an engine does, and what comes of it."""
    engine.initialize()
    with engine.train_mode():
        losses = [engine.train_batch(step) for step in range(2)]
    told: dict[str, Any] = {"losses": losses}
    operations: dict[str, Callable[[], Any]] = {
        "save": lambda: engine.save_checkpoint(folder),
        "export": lambda: {key: (str(t.device), float(t.double().sum())) for key, t in engine.get_per_tensor_param()},
    }
    for name, operation in operations.items():
        try:
            told[name] = operation()
        except RuntimeError as error:
            told[name] = " ".join(str(error).split())[:60]
    told["weights"] = [float(p.to_local().double().sum()) for p in engine.module.parameters()]  # type: ignore[attr-defined]
    return told


def make(revision: str) -> FSDPEngine:
    from diagkit.lab.engines import ENGINES
    from diagkit.lab.engines import revision as of

    return ENGINES["fsdp"](EngineConfig(), of(revision), "npu")


def main(folder: str) -> None:
    simulate(announce=False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,npu:hccl")
    torch.npu.set_device(dist.get_rank())  # type: ignore[attr-defined]
    out = Path(folder)
    answer: dict[str, Any] = {}
    for revision in ("before", "current"):
        answer[f"{revision} alone"] = life(make(revision), out / "saved")
        engine = make(revision)
        attached = dk.attach(engine, out=out / revision)
        answer[f"{revision} attached"] = life(engine, out / "saved")
        attached.detach()
        answer[f"{revision} covers left"] = [n for n, v in vars(engine).items() if "Cover" in type(v).__name__]
    actor, ref = build_engine("fsdp", "current", EngineConfig(), "npu"), make("current")
    first = dk.attach(actor, out=out / "two", label="actor")
    second = dk.attach(ref, recorder=first.recorder, label="ref")
    ref.initialize()
    actor.train_batch()
    for _ in ref.get_per_tensor_param():
        pass
    second.detach()
    first.detach()
    if os.environ["RANK"] == "0":
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
