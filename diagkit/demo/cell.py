"""One rank of one cell: a fresh engine, one operation, and a plain record of what happened.

Rules of this module: it runs in a process of its own that ends afterwards, because a failed FSDP operation can poison
the engine and the process with it. The record is JSON; nothing in it decides whether the outcome was right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diagkit.demo.experiments import Experiment
from diagkit.demo.observe import observe, summary
from diagkit.lab.engines import GUARDS, EngineConfig, FSDPEngine, build_engine, revision
from diagkit.lab.models import DecoderConfig, source_weights

__all__ = ["MODEL", "checkpoint_folder", "config_of", "run_cell", "run_preparation"]

MODEL = DecoderConfig()


def config_of(flags: str, device: str) -> EngineConfig:
    """The engine's configuration for one of :data:`diagkit.demo.experiments.FLAGS`."""
    manual = flags in ("both", "manual")
    return EngineConfig(
        model=MODEL,
        offload_policy=flags != "manual",
        param_offload=manual,
        optimizer_offload=manual,
        pin_memory=device != "cpu",
    )


def checkpoint_folder(out: Path, cell: Experiment) -> Path:
    """Where the checkpoint is that a load cell reads."""
    return out / "checkpoints" / f"{cell.engine}_{'manual' if cell.flags == 'manual' else 'policy'}"


def start_rank(rank: int, ranks: int, group: str, device: str, rendezvous: str) -> None:
    """Choose this rank's device and join the process group."""
    if device != "cpu":
        torch.get_device_module(device).set_device(rank)
    dist.init_process_group(group, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)


def run_preparation(cell: Experiment, out: Path, device: str) -> dict[str, Any]:
    """Write the checkpoint of a trained, guarded engine, for the load cells of this engine and these flags."""
    engine = build_engine(cell.engine, "current", config_of(cell.flags, device), device)
    with engine.train_mode():
        engine.train_batch()
    engine.save_checkpoint(checkpoint_folder(out, cell))
    return {"outcome": "ok"}


def run_cell(cell: Experiment, out: Path, device: str) -> dict[str, Any]:
    """Run the operation on a fresh engine and tell what happened on this rank."""
    started = time.monotonic()
    code = revision(cell.revision)
    if cell.without:
        code = code.without(*(guard for guard in GUARDS if guard.name in cell.without))
    engine = build_engine(cell.engine, code, config_of(cell.flags, device), device)
    record: dict[str, Any] = {"pid": os.getpid(), "exported": None, "values": None, "retry": None}
    with observe(engine.module) as seen:
        _operate(engine, cell, out, record)
    if seen.error is None and cell.operation == "load":
        record["values"] = "equal" if _holds_checkpoint(engine, checkpoint_folder(out, cell)) else "differ"
    if seen.error is not None and cell.operation == "train":
        record["retry"] = _retry(engine)
    record.update(
        outcome="ok" if seen.error is None else "crash",
        exception=_told(seen.error),
        first_cause=seen.first_cause,
        moves=seen.moves,
        residency={
            "rest": summary(seen.rest),
            "after_move": None if seen.after_first_move is None else summary(seen.after_first_move),
            "failure": None if seen.failure is None else summary(seen.failure),
            "end": summary(seen.end or {}),
        },
        rows={"rest": seen.rest, "after_move": seen.after_first_move, "failure": seen.failure, "end": seen.end},
        seconds=round(time.monotonic() - started, 3),
    )
    return record


def _operate(engine: FSDPEngine, cell: Experiment, out: Path, record: dict[str, Any]) -> None:
    match cell.operation:
        case "save":
            engine.save_checkpoint(out / "saved" / cell.slug)
        case "load":
            engine.load_checkpoint(checkpoint_folder(out, cell))
        case "export":
            _consume(engine.get_per_tensor_param(), engine, record)
        case "train":
            with engine.train_mode():
                engine.train_batch()
        case "move":
            engine.to(engine.device, model=True)
            engine.module.state_dict()


def _consume(tensors: Iterator[tuple[str, torch.Tensor]], engine: FSDPEngine, record: dict[str, Any]) -> None:
    """Take each exported tensor as a weight synchronisation would: where is it, and is it the source weight?"""
    source = source_weights(engine.config.model, engine.config.seed)
    devices: set[str] = set()
    equal = True
    for name, tensor in tensors:
        devices.add(tensor.device.type)
        equal = equal and torch.equal(tensor.cpu(), source.pop(name).to(tensor.dtype))
    record["exported"] = "+".join(sorted(devices))
    record["values"] = "equal" if equal and not source else "differ"


def _holds_checkpoint(engine: FSDPEngine, folder: Path) -> bool:
    """Whether the live parameters and optimizer state are, bit for bit, those of this rank's files."""
    manager = engine.checkpoint_manager
    pairs = [(engine.module.state_dict(), "model")]
    if engine.optimizer is not None:
        pairs.append((engine.optimizer.state_dict(), "optim"))
    return all(_same(live, torch.load(manager.path(folder, kind), weights_only=True)) for live, kind in pairs)


def _same(live: Any, saved: Any) -> bool:
    if isinstance(live, dict):
        return live.keys() == saved.keys() and all(_same(live[key], saved[key]) for key in live)
    if isinstance(live, (list, tuple)):
        return len(live) == len(saved) and all(_same(a, b) for a, b in zip(live, saved, strict=True))
    if isinstance(live, torch.Tensor):
        # Local shards, on the CPU: comparing DTensors would be a collective, and under `hccl` alone impossible.
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (live, saved))
        return torch.equal(a.cpu(), b.cpu())
    return bool(live == saved)


def _retry(engine: FSDPEngine) -> dict[str, str] | None:
    try:
        with engine.train_mode():
            engine.train_batch()
    except Exception as error:
        return _told(error)
    return None


def _told(error: BaseException | None) -> dict[str, str] | None:
    return None if error is None else {"type": type(error).__name__, "message": " ".join(str(error).split())}
