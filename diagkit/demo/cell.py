"""One rank of one cell: a fresh engine, one operation, and a plain record of what happened.

Rules of this module: it runs in a process of its own that ends afterwards, because a failed FSDP operation can poison
the engine and the process with it. The record is JSON; nothing in it decides whether the outcome was right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diagkit.capture import Recorder, start
from diagkit.demo.experiments import Experiment, checkpoint_folder, checkpoint_kind
from diagkit.lab.engines import ENGINES, GUARDS, EngineConfig, FSDPEngine, build_engine, revision
from diagkit.lab.models import DecoderConfig, source_weights

__all__ = [
    "MODEL",
    "config_of",
    "raised",
    "run_cell",
    "run_preparation",
    "watch_when_built",
]

MODEL = DecoderConfig()


def config_of(flags: str, device: str) -> EngineConfig:
    """The engine's configuration for one of :data:`diagkit.demo.experiments.FLAGS`."""
    manual = flags in ("both", "manual")
    return EngineConfig(
        model=replace(MODEL, lora_rank=2) if flags == "lora" else MODEL,
        offload_policy=flags != "manual",
        param_offload=manual,
        optimizer_offload=manual,
        pin_memory=device != "cpu",
    )


def trace_folder(out: Path, cell: Experiment) -> Path:
    """Where the ranks of a cell leave their traces and logs."""
    return out / "cells" / cell.slug


def start_rank(rank: int, ranks: int, group: str, device: str, rendezvous: str) -> None:
    """Choose this rank's device and join the process group."""
    if device != "cpu":
        torch.get_device_module(device).set_device(rank)
    dist.init_process_group(group, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)


def run_preparation(cell: Experiment, out: Path, device: str) -> dict[str, Any]:
    """Write the checkpoint of a trained, guarded engine, for the load cells of this engine and these flags."""
    engine = build_engine(cell.engine, "current", config_of(checkpoint_kind(cell.flags), device), device)
    with engine.train_mode():
        engine.train_batch()
    engine.save_checkpoint(checkpoint_folder(out, cell))
    return {"outcome": "ok"}


def run_cell(
    cell: Experiment, out: Path, device: str, checkpoint: Path | None = None, run: str | None = None
) -> dict[str, Any]:
    """Record the engine's construction and one operation on it; tell what only this process can know.

    A load reads ``checkpoint``, by default the one that :func:`run_preparation` wrote for this cell. ``run`` is the id
    that the traces of all ranks carry.

    Where everything was, what moved it and what failed first is in the trace (`evidence.py` reads it).
    """
    started = time.monotonic()
    told: dict[str, Any] = {"exported": None, "values": None, "retry": None, "exception": None}
    engine = _engine(cell, device)
    checkpoint = checkpoint or checkpoint_folder(out, cell)
    recorder = start(None, out=trace_folder(out, cell), run=run, job={"experiment": cell.name}, overwrite=True)
    with recorder.phase("init", "initialize"):
        watch_when_built(engine, recorder)
        engine.initialize()
    recorder.watch(engine=engine)
    try:
        saved = out / "saved" / cell.slug if cell.operation == "save" else checkpoint
        _operate(engine, cell.operation, saved, recorder, told)
    except Exception as error:
        told["exception"] = raised(error)
        if cell.operation == "train":
            with contextlib.suppress(Exception), recorder.phase("train", "retry"):
                told["retry"] = _retry(engine)
    recorder.close()
    if told["exception"] is None and cell.operation == "load":
        told["values"] = "equal" if _holds_checkpoint(engine, checkpoint) else "differ"
    told["outcome"] = "ok" if told["exception"] is None else "crash"
    told["seconds"] = round(time.monotonic() - started, 3)
    return told


def _engine(cell: Experiment, device: str) -> FSDPEngine:
    code = revision(cell.revision)
    if cell.without:
        code = code.without(*(guard for guard in GUARDS if guard.name in cell.without))
    return ENGINES[cell.engine](config_of(cell.flags, device), code, device)


def watch_when_built(engine: FSDPEngine, recorder: Recorder) -> None:
    """Take model and optimizer into the recording as soon as they exist, from outside.

    The FSDP engine's module is there before its weights: its load splits every parameter for a moment, which belongs
    into the trace of every revision.
    """
    load, build = engine._load_full_state, engine._build_optimizer

    def load_watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder.watch(module)
        load(module, *args, **kwargs)

    def build_watched() -> None:
        recorder.watch(engine.module)
        build()
        if engine.optimizer is not None:
            recorder.watch(optimizer=engine.optimizer)

    engine._load_full_state, engine._build_optimizer = load_watched, build_watched  # type: ignore[method-assign]


def _operate(engine: FSDPEngine, operation: str, folder: Path, recorder: Recorder, told: dict[str, Any]) -> None:
    with recorder.phase(operation):
        match operation:
            case "save":
                engine.save_checkpoint(folder)
            case "load":
                engine.load_checkpoint(folder)
            case "export":
                _consume(recorder.exported(engine.get_per_tensor_param()), engine, told)
            case "train":
                with engine.train_mode():
                    engine.train_batch()
            case "move":
                engine.to(engine.device, model=True)
                engine.module.state_dict()


def _consume(tensors: Iterator[tuple[str, torch.Tensor]], engine: FSDPEngine, told: dict[str, Any]) -> None:
    """Take each exported tensor as a weight synchronisation would: where is it, and is it the source weight?"""
    source = source_weights(engine.config.model, engine.config.seed)
    devices: set[str] = set()
    equal = True
    for name, tensor in tensors:
        devices.add(tensor.device.type)
        equal = equal and torch.equal(tensor.cpu(), source.pop(name).to(tensor.dtype))
    told["exported"] = "+".join(sorted(devices))
    told["values"] = "equal" if equal and not source else "differ"


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
        return raised(error)
    return None


def raised(error: BaseException) -> dict[str, str]:
    """An exception as JSON, its message on one line."""
    return {"type": type(error).__name__, "message": " ".join(str(error).split())}
