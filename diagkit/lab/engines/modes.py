"""The train and eval contexts around a batch: the one place where a manual offload still meets the policy today.

Rules of this module: entering calls ``engine.to(device, ...)`` for whatever the offload flags name, and leaving calls
``engine.to("cpu", ...)`` with the same flags. Neither asks whether FSDP owns the device: no revision of the fix guards
these, which is why an engine with the policy **and** ``param_offload`` fails in its first train step.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagkit.lab.engines.fsdp import FSDPEngine

__all__ = ["EvalMode", "TrainMode"]


class _Mode:
    def __init__(self, engine: FSDPEngine, training: bool) -> None:
        self.engine = engine
        self.training = training

    def _to(self, device: str) -> None:
        engine = self.engine
        engine.to(
            device,
            model=engine._is_offload_param,
            optimizer=engine._is_offload_optimizer,
            grad=engine._is_offload_param,
        )

    def __enter__(self) -> None:
        engine = self.engine
        engine.mode = "train" if self.training else "eval"
        if engine._is_offload_param or engine._is_offload_optimizer:
            self._to(engine.device)
        engine.module.train(self.training)


class TrainMode(_Mode):
    """``with engine.train_mode(): engine.train_batch(...)``; leaving zeroes the gradients."""

    def __init__(self, engine: FSDPEngine) -> None:
        super().__init__(engine, training=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.optimizer_zero_grad()
        self._to("cpu")
        self.engine.mode = None


class EvalMode(_Mode):
    """``with engine.eval_mode(): engine.infer_batch(...)``; leaving reshards the parameters."""

    def __init__(self, engine: FSDPEngine) -> None:
        super().__init__(engine, training=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.reshard()
        self._to("cpu")
        self.engine.mode = None
