"""The checkpoint manager that both engines share: one sharded file of each kind per rank, written and read for real.

Rules of this module: it never moves the model. It takes `state_dict()` of whatever it is given, which is why a split
parameter fails here although the move that split it happened in the engine. Files are read back with
``weights_only=True``, so nothing that a checkpoint holds is executed.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diagkit.errors import EngineError

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves and loads model shards, optimizer state, scheduler and random-number state of one rank.

    Every rank of the default process group must call :meth:`save` and :meth:`load` together (both meet in a barrier).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        device: str,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def path(self, folder: Path, kind: str) -> Path:
        """This rank's file of one kind: ``model``, ``optim`` or ``extra_state``."""
        return folder / f"{kind}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def save(self, folder: str | Path) -> None:
        """Write this rank's files. The order is the field's: barrier, model, optimizer, extra, config, barrier."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        torch.save(self.module.state_dict(), self.path(folder, "model"))
        if self.optimizer is not None:
            torch.save(self.optimizer.state_dict(), self.path(folder, "optim"))
        torch.save(self._extra_state(), self.path(folder, "extra_state"))
        if self.rank == 0:
            config = getattr(self.module, "config", None)
            described = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
            text = json.dumps({"world_size": self.world_size, "model": described}, indent=1)
            (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        dist.barrier()

    def load(self, folder: str | Path) -> None:
        """Read this rank's files back into the live module, optimizer, scheduler and generators.

        Raises:
            EngineError: the folder holds no checkpoint of this world size.
        """
        folder = Path(folder)
        self.module.load_state_dict(self._read(folder, "model"))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self._read(folder, "optim"))
        extra = self._read(folder, "extra_state")
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        version, internal, gauss = extra["python_rng"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(extra["cpu_rng"])
        if "device_rng" in extra:
            torch.get_device_module(self.device).set_rng_state(extra["device_rng"])

    def _read(self, folder: Path, kind: str) -> dict[str, Any]:
        path = self.path(folder, kind)
        if not path.is_file():
            raise EngineError(
                "no checkpoint of this world size",
                expected=path.name,
                where=str(folder),
                remedy="Load with as many ranks as saved it",
            )
        content: dict[str, Any] = torch.load(path, weights_only=True)
        return content

    def _extra_state(self) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "cpu_rng": torch.get_rng_state(),
            "python_rng": random.getstate(),
        }
        if self.device != "cpu":
            extra["device_rng"] = torch.get_device_module(self.device).get_rng_state()
        return extra
