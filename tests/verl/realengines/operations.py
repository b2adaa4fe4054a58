"""What one cell does with its initialised engine; each function returns what else is worth comparing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from realengines import build, observe
from realengines.cells import Cell


def _train_step(engine: Any, rank: int) -> float:
    with engine.train_mode():
        output = engine.train_batch(build.make_batch(rank), build.loss_function)
    return float(sum(output["loss"]))


def _init(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    return {"engine_class": type(engine).__name__}


def _train(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """One step through the engine's own context manager and batch method."""
    before = observe.local_values(engine.module)
    loss = _train_step(engine, rank)
    after = observe.local_values(engine.module)
    return {"loss": loss, "weights_changed": sum(not torch.equal(before[name], after[name]) for name in before)}


def checkpoint_folder(cell: Cell, out: Path) -> Path:
    """Where the preparing cell leaves the checkpoint that this cell's load reads."""
    return out / replace(cell, operation="checkpoint").name / "checkpoint"


def _checkpoint(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """Write a real checkpoint through verl's checkpoint manager, past the engine's own moves, after one train step."""
    if cell.offload != "both":
        # With both owners the train step itself is what fails, and a checkpoint is wanted all the same.
        _train_step(engine, rank)
    engine.checkpoint_manager.save_checkpoint(str(checkpoint_folder(cell, out)))
    torch.save(observe.local_values(engine.module), checkpoint_folder(cell, out) / f"expected-{rank}.pt")
    dist.barrier()
    return {}


def _save(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    folder = out / cell.name / "saved"
    engine.save_checkpoint(str(folder))
    return {"files": sorted(path.name for path in folder.glob(f"*_rank_{rank}.pt"))}


def _load(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    folder = checkpoint_folder(cell, out)
    engine.load_checkpoint(str(folder))
    expected = torch.load(folder / f"expected-{rank}.pt", weights_only=True)
    found = observe.local_values(engine.module)
    return {"values_equal": all(torch.equal(expected[name], found[name]) for name in expected)}


def _export(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """Consume the whole generator, as a weight synchronisation does, and compare with the weights on disk."""
    from safetensors.torch import load_file

    source = load_file(model / "model.safetensors")
    parameters, _ = engine.get_per_tensor_param()
    devices: Counter[str] = Counter()
    unequal = []
    for name, tensor in parameters:
        devices[tensor.device.type] += 1
        if not torch.equal(tensor.to("cpu", torch.bfloat16), source[name].to(torch.bfloat16)):
            unequal.append(name)
    return {"exported": dict(devices), "values_equal": not unequal and sum(devices.values()) == len(source)}


def _to(engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """The manual move that no release guards."""
    engine.to("npu", model=True, optimizer=True, grad=True)
    return {}


OPERATIONS: dict[str, Callable[[Any, Cell, int, Path, Path], dict[str, Any]]] = {
    "init": _init,
    "train": _train,
    "checkpoint": _checkpoint,
    "save": _save,
    "load": _load,
    "export": _export,
    "to": _to,
}
