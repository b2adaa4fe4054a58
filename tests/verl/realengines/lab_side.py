"""The lab's engines behind the same functions as `verl_side.py`, so that one driver and one observer serve both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from diagkit.lab.engines import ENGINES, EngineConfig, revision
from diagkit.lab.models import source_weights as lab_weights
from realengines.cells import OFFLOADS, Cell


def make_engine(cell: Cell, model: Path) -> Any:
    """Construct the lab's engine at the revision that the cell names, uninitialised."""
    offload = {"offload_policy": False, **OFFLOADS[cell.offload]}
    return ENGINES[cell.engine](EngineConfig(**offload), revision(cell.release))


def train_step(engine: Any, rank: int) -> float:
    """One step inside the engine's train context."""
    with engine.train_mode():
        return float(engine.train_batch())


def write_checkpoint(engine: Any, folder: Path) -> None:
    """Write a checkpoint through the engine's checkpoint manager, past the engine's own moves."""
    engine.checkpoint_manager.save(folder)


def exported(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a weight synchronisation is given, tensor by tensor."""
    return iter(engine.get_per_tensor_param())


def source_weights(model: Path) -> dict[str, torch.Tensor]:
    """The weights that the engine was built from."""
    return lab_weights(EngineConfig().model, EngineConfig().seed)
