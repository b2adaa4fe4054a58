"""One rank of one scenario: a fresh engine, and step after step, whatever the steps before came to.

Rules of this module: as in `cell.py`, it runs in a process of its own that ends afterwards. A step that fails does not
end the life: what happens to those who go on is part of the lesson.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diagkit.capture import Recorder, start
from diagkit.demo.cell import MODEL, raised, watch_when_built
from diagkit.demo.scenario import Scenario
from diagkit.lab.engines import ENGINES, GUARDS, EngineConfig, FSDPEngine, revision

__all__ = ["engine_of", "run_life"]


def engine_of(scenario: Scenario, device: str) -> FSDPEngine:
    """The engine that the scenario describes, before its ``initialize()``; needs no process group.

    Raises:
        UsageError: ``without`` names a guard that this revision does not have.
    """
    code = revision(scenario.revision)
    if scenario.without:
        code = code.without(*(guard for guard in GUARDS if guard.name in scenario.without))
    config = EngineConfig(
        model=MODEL,
        offload_policy=scenario.offload_policy,
        param_offload=scenario.param_offload,
        optimizer_offload=scenario.optimizer_offload,
        pin_memory=scenario.pin_memory,
        init_device=None if scenario.init == "engine" else scenario.init,
    )
    return ENGINES[scenario.engine](config, code, device)


def run_life(scenario: Scenario, out: Path, checkpoint: Path, device: str, run: str | None = None) -> dict[str, Any]:
    """Record the engine's construction and every step on it, each as a phase of its own.

    The trace goes to ``out``; a load reads ``checkpoint`` until something was saved. ``run`` is the id that the traces
    of all ranks carry. Returns a plain record: per step the message of what it raised, and where exported tensors were.
    """
    engine = engine_of(scenario, device)
    recorder = start(None, out=out, run=run, job={"experiment": scenario.name}, overwrite=True)
    life = _Life(engine, recorder, out / "saved", checkpoint)
    for name, step in zip(scenario.names, ("init", *scenario.steps), strict=True):
        if not life.attempt(name, step) and step == "init":
            break
    recorder.close()
    failed = any(step["message"] for step in life.steps)
    return {"outcome": "crash" if failed else "ok", "steps": life.steps}


class _Life:
    def __init__(self, engine: FSDPEngine, recorder: Recorder, folder: Path, checkpoint: Path) -> None:
        self.engine = engine
        self.recorder = recorder
        self.folder = folder
        self.checkpoint = checkpoint
        self.steps: list[dict[str, str]] = []

    def attempt(self, name: str, step: str) -> bool:
        message, exported = "", ""
        operation: Callable[[], str | None] = getattr(self, f"_{step.replace(' ', '_')}")
        try:
            with self.recorder.phase(name):
                exported = operation() or ""
        except Exception as error:
            message = f"{type(error).__name__}: {raised(error)['message']}"
        self.steps.append({"name": name, "message": message, "exported": exported})
        return not message

    def _init(self) -> None:
        watch_when_built(self.engine, self.recorder)
        self.engine.initialize()
        self.recorder.watch(engine=self.engine)

    def _train(self) -> None:
        with self.engine.train_mode():
            self.engine.train_batch()

    def _save(self) -> None:
        self.engine.save_checkpoint(self.folder)
        self.checkpoint = self.folder

    def _load(self) -> None:
        self.engine.load_checkpoint(self.checkpoint)

    def _export(self) -> str:
        exported = self.recorder.exported(self.engine.get_per_tensor_param())
        return "+".join(sorted({tensor.device.type for _, tensor in exported}))

    def _to_device(self) -> None:
        self.engine.to(self.engine.device)

    def _to_cpu(self) -> None:
        self.engine.to("cpu")
