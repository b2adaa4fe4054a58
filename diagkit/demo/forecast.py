"""What a scenario will do, worked out on paper before anything runs.

Rules of this module: whether an engine moves its model is asked of the engine's own code, its guards; what an operation
does in a state is looked up in the measured tables. Nothing here knows an outcome by itself, and a run decides who was
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from diagkit.demo.life import engine_of
from diagkit.demo.scenario import Scenario
from diagkit.diagnosis.predictions import Facets, predict
from diagkit.diagnosis.predictions.facets import among
from diagkit.diagnosis.predictions.lookup import Cell
from diagkit.lab.engines import FSDPEngine, VeOmniEngine
from diagkit.lab.engines.guards import VEOMNI_EXPORT_STAGES

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one step will do: ``outcome`` is ``ok``, ``crash``, ``not reached`` or ``unknown``; ``text`` says it.

    ``moves`` says which moves of the whole model the engine makes for it; ``source`` where the prediction comes from.
    """

    step: str
    outcome: str
    text: str
    moves: str = ""
    source: str = ""


def forecast(scenario: Scenario, ranks: int = 2, torch_version: str = torch.__version__) -> tuple[Forecast, ...]:
    """One forecast a step, ``init`` first.

    >>> [step.outcome for step in forecast(Scenario("fsdp", "before", ("train", "save")))]
    ['ok', 'ok', 'crash']
    """
    paper = _Paper(scenario, ranks, torch_version)
    found: list[Forecast] = []
    for name, step in zip(scenario.names, ("init", *scenario.steps), strict=True):
        if found and found[0].outcome == "crash":
            found.append(Forecast(name, "not reached", "is not reached: there is no engine"))
        else:
            found.append(paper.step(name, step))
    return tuple(found)


# What needs a collective over the bytes as they lie.
_GATHERS = ("clip_grad_norm_", "full_tensor")
_PASSES = ("forward", "backward", "clip_grad_norm_", "optimizer.step")


class _Fails(Exception):
    """The operation raises, says the table."""


class _Unknown(Exception):
    """No state like this one was measured."""


class _Module:
    """All that a guard asks of a module: the device that its first parameter names."""

    def __init__(self, device: str) -> None:
        self.first = torch.empty(0, device=device)

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter([self.first])


class _Paper:
    """An engine that has not been built, the state that its model would be in, and what each step makes of it.

    Buffers are left out: the lab's model brings its own to the computation.
    """

    def __init__(self, scenario: Scenario, ranks: int, torch_version: str) -> None:
        self.scenario = scenario
        self.torch = torch_version
        self.engine: FSDPEngine = engine_of(scenario, "npu")
        self.veomni = isinstance(self.engine, VeOmniEngine)
        pinned = "pinned" if scenario.pin_memory else "unpinned"
        policy = pinned if scenario.offload_policy else "none"
        self.state = Facets(policy=policy, ranks=among(ranks, scenario.cpu_backend, torch_version))
        self.moments = ""  # the optimizer state's device, "" where there is none
        self.saved = "cpu"  # the moments in the checkpoint that a load reads: a trained engine's, unless saved here
        self.moves: list[str] = []
        self.notes: list[str] = []
        self.sources: list[str] = []

    # ---- the state

    @property
    def names_cpu(self) -> bool:
        """Whether the parameters' metadata names the CPU."""
        return self.state.parameters == "parked" or (
            self.state.policy != "none" and self.state.parameters not in ("split", "moved")
        )

    @property
    def bytes_on(self) -> str:
        return "cpu" if self.names_cpu or self.state.parameters == "split" else "device"

    def ask(self, operation: str) -> Cell:
        """What the measured table says of the operation now; notes what is remarkable.

        Raises:
            _Fails: that it raises.
            _Unknown: nothing.
        """
        stranded = self.moments and self.moments != self.bytes_on
        state = replace(self.state, optimizer="stranded" if stranded else "home" if self.moments else "empty")
        if operation in _GATHERS and self.bytes_on == "cpu":
            # All that decides is whether CPU bytes find a backend; measured in the healthy state alone.
            state = Facets(policy="pinned", lazy_init="done", optimizer="home", ranks=state.ranks)
        found = predict(state, self.torch)
        if operation not in _PASSES:  # what lazy initialisation and an aborted backward pass are nothing to
            settled = replace(state, backward="idle", lazy_init="done")
            found = found or predict(settled, self.torch)
        if found is None:
            raise _Unknown
        self.sources.append(found.label or f"measured on torch {found.torch}")
        cell = found[operation]
        if cell.outcome in ("crash", "blocked"):
            raise _Fails(cell.text)
        if cell.outcome == "silent":
            self.notes.append(cell.text)
        return cell

    def to_device(self, model: bool, optimizer: bool) -> None:
        if model:
            self.moves.append("to the device")
            self.ask(".to(device)")
            moved = {"pinned": "split", "unpinned": "moved", "none": "home"}[self.state.policy]
            self.state = replace(self.state, parameters=moved)
        if optimizer and self.moments:
            self.moments = "device"

    def to_cpu(self, model: bool, optimizer: bool) -> None:
        if model:
            self.moves.append("to the cpu")
            self.ask('.to("cpu")')
            rest = "parked" if self.state.policy == "none" else "home"
            self.state = replace(self.state, parameters=rest)
        if optimizer and self.moments:
            self.moments = "cpu"

    # ---- the steps

    def step(self, name: str, step: str) -> Forecast:
        self.moves, self.notes, self.sources = [], [], []
        self.engine.module = _Module("cpu" if self.names_cpu else "meta")  # type: ignore[assignment]
        outcome = "ok"
        try:
            text = getattr(self, f"_{step.replace(' ', '_')}")() or next(iter(self.notes), "works")
        except _Fails as failure:
            outcome, text = "crash", str(failure)
        except _Unknown:
            outcome, text = "unknown", "is not known: no state like this was measured"
        return Forecast(name, outcome, text, ", then ".join(self.moves), next(iter(self.sources), ""))

    def _init(self) -> None:
        if self.scenario.init == "meta" and not self.veomni:
            raise _Fails("raises, because there are no bytes on meta: rank 0 must have the weights")
        if self.scenario.offload_policy and not self.veomni:
            self.engine._take_the_policy()
        if self.engine._is_offload_param and not self.scenario.offload_policy:
            self.state = replace(self.state, parameters="parked")

    def _train(self) -> None:
        engine = self.engine
        self.to_device(engine._is_offload_param, engine._is_offload_optimizer)
        try:
            for operation in ("forward", "backward", "clip_grad_norm_", "optimizer.step"):
                if operation == "clip_grad_norm_" and self.veomni:
                    continue  # it sums norms on the accelerator, with a clip of its own
                self._pass(operation)
            self.moments = self.moments or self.bytes_on
        finally:
            self.to_cpu(engine._is_offload_param, engine._is_offload_optimizer)

    def _pass(self, operation: str) -> None:
        try:
            self.ask(operation)
        except _Fails:
            if operation == "forward" and self.state.lazy_init == "no":
                self.state = replace(self.state, lazy_init="unfinished")
            if operation == "backward":
                self.state = replace(self.state, backward="aborted")
            raise
        if operation == "forward":
            self.state = replace(self.state, lazy_init="done")

    def _save(self) -> None:
        if self.engine._save_moves_model():
            self.to_device(True, False)
        self.ask("save")
        self.saved = self.moments
        self.to_cpu(self.engine._is_offload_param, False)

    def _load(self) -> None:
        if self.engine._load_moves_model():
            self.to_device(True, False)
        self.ask("load_state_dict")
        if self.saved:
            self.ask("optimizer.load_state_dict")
        self.moments = self.saved and ("cpu" if self.names_cpu else "device")
        self.to_cpu(self.engine._is_offload_param, self.engine._is_offload_optimizer)

    def _export(self) -> str:
        if self.engine._export_moves_model():
            self.to_device(True, False)
        self.ask("state_dict")
        aliased = self.state
        self.to_cpu(self.engine._export_offloads_model(), False)
        after, self.state = self.state, aliased  # what is exported lies where the parameters lay
        try:
            return f"works, tensors on the {self._gathered()}"
        finally:
            self.state = after

    def _gathered(self) -> str:
        if not self.veomni or self.engine.has(VEOMNI_EXPORT_STAGES):
            return "cpu" if self.ask("export").error == "on cpu" else "device"
        return "cpu" if self.ask("full_tensor").error == "on cpu" else "device"

    def _to_device(self) -> None:
        self.to_device(True, True)

    def _to_cpu(self) -> None:
        self.to_cpu(True, True)
