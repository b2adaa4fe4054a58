"""What one cell does with its initialised engine; each function returns what else is worth comparing.

``side`` is the module that knows how to drive this engine: `verl_side` or `lab_side`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from realengines import observe
from realengines.cells import Cell

Operation = Callable[[ModuleType, Any, Cell, int, Path, Path], dict[str, Any]]


def side_of(cell: Cell) -> ModuleType:
    """Return the module that drives this cell's engine."""
    return importlib.import_module("realengines.verl_side" if cell.is_real else "realengines.lab_side")


def checkpoint_folder(cell: Cell, out: Path) -> Path:
    """Where the preparing cell leaves the checkpoint that this cell's load reads."""
    return out / replace(cell, operation="checkpoint").name / "checkpoint"


def _init(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    return {"engine_class": type(engine).__name__}


def _train(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    before = observe.local_values(engine.module)
    loss = side.train_step(engine, rank)
    after = observe.local_values(engine.module)
    empty = sum(not value.numel() for value in before.values())
    changed = sum(not torch.equal(before[name], after[name]) for name in before)
    return {"loss": loss, "every_weight_changed": changed + empty == len(before)}


def _checkpoint(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """Write a real checkpoint, after one train step where the engine can train (with two owners it cannot)."""
    folder = checkpoint_folder(cell, out)
    if cell.offload != "both":
        side.train_step(engine, rank)
    side.write_checkpoint(engine, folder)
    torch.save(observe.local_values(engine.module), folder / f"expected-{rank}.pt")
    dist.barrier()
    return {}


def _save(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    folder = out / cell.name / "saved"
    engine.save_checkpoint(str(folder))
    return {"files": sorted(path.name for path in folder.glob(f"*_rank_{rank}.pt"))}


def _load(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    folder = checkpoint_folder(cell, out)
    engine.load_checkpoint(str(folder))
    expected = torch.load(folder / f"expected-{rank}.pt", weights_only=True)
    found = observe.local_values(engine.module)
    return {"values_equal": all(torch.equal(expected[name], found[name]) for name in expected)}


def _export(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """Consume the whole generator, as a weight synchronisation does, and compare with the weights built from."""
    source = side.source_weights(model)
    devices: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    equal = 0
    for name, tensor in side.exported(engine):
        devices[tensor.device.type] += 1
        dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        equal += torch.equal(tensor.to("cpu", torch.bfloat16), source[name].to(torch.bfloat16))
    return {"exported": dict(devices), "dtypes": dict(dtypes), "values_equal": equal == len(source)}


def _to(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """The manual move that no release guards."""
    engine.to("npu", model=True, optimizer=True, grad=True)
    return {}


def _heal(side: ModuleType, engine: Any, cell: Cell, rank: int, out: Path, model: Path) -> dict[str, Any]:
    """Go on after a save that crashed: mend the engine, train a step."""
    import diagkit

    crash = ""
    try:
        engine.save_checkpoint(str(out / cell.name / "saved"))
    except RuntimeError as error:
        crash = str(error)
    healing = diagkit.heal(engine)
    return {"crash": crash, "healed": list(healing.codes), **_train(side, engine, cell, rank, out, model)}


OPERATIONS: dict[str, Operation] = {
    "init": _init,
    "train": _train,
    "checkpoint": _checkpoint,
    "save": _save,
    "load": _load,
    "export": _export,
    "to": _to,
    "heal": _heal,
}
