"""One engine's whole life, chosen freely: how it is built, and what is done to it in which order; and what came of it.

Rules of this module: data and names only, nothing here imports torch. An `Experiment` is one cell of the published
table; a `Scenario` is whatever somebody wants to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from diagkit.demo.experiments import ENGINES, REVISIONS, Experiment, group_names
from diagkit.errors import UsageError

__all__ = ["INITS", "STEPS", "Life", "Scenario", "Step", "merged"]

STEPS: dict[str, str] = {
    "train": "with engine.train_mode(): engine.train_batch()",
    "save": "engine.save_checkpoint(folder)",
    "load": "engine.load_checkpoint(folder): what this life saved last, else what a trained engine wrote",
    "export": "every tensor of engine.get_per_tensor_param()",
    "to device": "engine.to(device): model and optimizer, by hand",
    "to cpu": 'engine.to("cpu"): model and optimizer, by hand',
}
"""What can be done to an engine once it is there, in any order and any number of times."""

INITS: dict[str, str] = {
    "engine": "each engine's own way: FSDP builds on the cpu on rank 0 and on meta elsewhere, VeOmni on meta",
    "cpu": "every rank builds on the cpu",
    "meta": "every rank builds on meta",
}
"""Where the module is built, before it is sharded."""


@dataclass(frozen=True)
class Scenario:
    """How the engine is built (each field is one thing to change), and the steps that follow, in order.

    ``cpu_backend``: the process group has a backend for the CPU too (``cpu:gloo,npu:hccl``), not only the accelerator's
    (``hccl``). ``without`` names guards that are taken out of the revision.

    Raises:
        UsageError: a value that no engine knows.

    >>> Scenario("veomni", "#7103", ("train", "save", "save")).names
    ('init', 'train', 'save', 'save 2')
    """

    engine: str = "fsdp"
    revision: str = "current"
    steps: tuple[str, ...] = ("save",)
    offload_policy: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    pin_memory: bool = True
    init: str = "engine"
    cpu_backend: bool = True
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "without"):  # JSON brings lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _known("engine", [self.engine], ENGINES)
        _known("revision", [self.revision], REVISIONS)
        _known("step", self.steps, tuple(STEPS))
        _known("first device", [self.init], tuple(INITS))

    @property
    def names(self) -> tuple[str, ...]:
        """The steps by names of their own, ``init`` first: they are the phases of the trace."""
        seen: Counter[str] = Counter()
        names = ["init"]
        for step in self.steps:
            seen[step] += 1
            names.append(step if seen[step] == 1 else f"{step} {seen[step]}")
        return tuple(names)

    @property
    def settings(self) -> str:
        """What differs from an engine under the policy with its usual settings, in a few words; often nothing."""
        usual = {field.name: field.default for field in fields(self)}
        words = [] if self.offload_policy else ["no offload policy"]
        words += [name for name in ("param_offload", "optimizer_offload") if getattr(self, name)]
        words += [f"{name}={value}" for name in ("pin_memory", "init") if (value := getattr(self, name)) != usual[name]]
        words += [] if self.cpu_backend else ["no cpu backend"]
        words += [f"without {guard}" for guard in self.without]
        return ", ".join(words)

    @property
    def name(self) -> str:
        """``fsdp before (param_offload): train, save``."""
        settings = f" ({self.settings})" if self.settings else ""
        return f"{self.engine} {self.revision}{settings}: {', '.join(self.steps) or 'init'}"

    def group(self, device: str) -> str:
        """The process group's backends on this type of device."""
        both, alone = group_names(device)
        return both if self.cpu_backend else alone

    def writer(self, device: str) -> Experiment:
        """The experiment whose engine writes the checkpoint that a ``load`` reads."""
        return Experiment(
            self.engine, "current", "load", "policy" if self.offload_policy else "manual", self.group(device)
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did on all ranks.

    ``outcome``: ``ok``, ``crash`` (on some rank), ``no answer`` (killed, or out of time), or ``not reached``.
    ``exported``: the devices of exported tensors, such as ``cpu``.
    """

    name: str
    outcome: str
    message: str = ""
    exported: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """What came of a scenario. ``trace`` is its trace's folder, ``seconds`` how long all of it took."""

    scenario: Scenario
    ranks: int
    device: str
    simulated: bool
    torch: str
    steps: tuple[Step, ...]
    trace: str
    seconds: float

    @property
    def first_failure(self) -> str | None:
        """The name of the first step that did not come out well."""
        return next((step.name for step in self.steps if step.outcome != "ok"), None)

    def step(self, name: str) -> Step:
        """The step of that name.

        Raises:
            UsageError: the scenario has none.
        """
        _known("step of this scenario", [name], [step.name for step in self.steps])
        return next(step for step in self.steps if step.name == name)


def merged(scenario: Scenario, records: Sequence[dict[str, Any] | None]) -> tuple[Step, ...]:
    """The ranks' own records, merged: a step failed if it failed anywhere. A rank without a record did not answer."""
    steps: list[Step] = []
    for place, name in enumerate(scenario.names):
        mine = [record["steps"][place] for record in records if record and place < len(record["steps"])]
        failed = next((step["message"] for step in mine if step["message"]), "")
        exported = next((step["exported"] for step in mine if step["exported"]), "")
        if failed:
            outcome = "crash"
        elif len(mine) == len(records):
            outcome = "ok"
        else:
            # Of a rank that never answered nobody knows how far it came; a step that it has to share cannot be ok.
            silent = any(record is None for record in records) and all(step.outcome == "ok" for step in steps)
            outcome = "no answer" if silent else "not reached"
        steps.append(Step(name, outcome, failed, exported))
    return tuple(steps)


def _known(what: str, values: Sequence[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise UsageError(f"unknown {what}", found=value, remedy=f"Choose one of {', '.join(known)}")
