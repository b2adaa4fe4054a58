"""What the scenarios of `diagnosis_ranks.py` share: how one is entered, what it works with, and how all are run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import culprits
import torch

import diagkit as dk
from diagkit.capture import Recorder
from diagkit.demo.predictions.bench import DECODER, Bench, Kind, build
from diagkit.demo.predictions.forked import fork_ranks

SCENARIOS: dict[str, tuple[Callable[[Lab], None], int, str]] = {}


@dataclass
class Lab:
    """What a scenario works with, and what it found."""

    folder: Path
    rank: int
    detail: str = "transitions"
    answer: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def recorded(self, bench: Bench, engine: object | None = None) -> Iterator[Recorder]:
        with dk.record(bench.model, bench.optimizer, out=self.folder, detail=self.detail, engine=engine) as rec:
            yield rec

    def look(self, label: str, bench: Bench) -> None:
        """What a live look says now."""
        self.answer[label] = list(dk.inspect(bench.model, bench.optimizer).findings.codes)

    def fails(self, rec: Recorder, phase: str, work: Callable[[], object]) -> None:
        """The work must raise; what it said is kept."""
        try:
            with rec.phase(phase):
                work()
        except Exception as error:
            self.answer[f"{phase} failed"] = f"{type(error).__name__}: {error}"[:300]
        else:
            raise AssertionError(f"{phase} was expected to fail")

    def cured(self, rec: Recorder, bench: Bench, like: Bench | None = None) -> None:
        """Two training steps; with ``like``, the very losses of a model that nothing happened to."""
        with rec.phase("after"):
            losses = two_losses(bench)
        moved = all(p.grad is not None for p in bench.optimizer.param_groups[0]["params"])
        self.answer["losses"] = losses
        self.answer["cured"] = moved and (like is None or losses == two_losses(like))
        self.look("after", bench)


def scenario(
    ranks: int = 1, group: str = "mixed", alone: bool = False
) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Enters a function under its name; ``alone`` enters it on one rank, too, as ``NAME_one_rank``."""

    def enter(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        SCENARIOS[function.__name__] = (function, ranks, group)
        if alone:
            SCENARIOS[f"{function.__name__}_one_rank"] = (function, 1, group)
        return function

    return enter


def two_losses(bench: Bench) -> list[float]:
    """Of two training steps, after each of which the model can be saved."""
    out = []
    for _ in range(2):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        loss.backward()
        bench.optimizer.step()
        bench.model.state_dict()
        out.append(float(loss))
    return out


def trained(policy: str = "pinned", kind: Kind = DECODER) -> Bench:
    """After one step, without gradients."""
    bench = build(kind, policy)
    bench.train()
    bench.optimizer.zero_grad()
    return bench


def loss_of(bench: Bench) -> float:
    """The loss of one forward pass, after which everything is sharded again."""
    with torch.no_grad():
        loss = float(bench.loss())
    bench.model.reshard()  # type: ignore[operator]
    return loss


def mend(bench: Bench) -> None:
    """The way home for parameters, and the way back for buffers."""
    culprits.offload_model_to_cpu(bench.model)
    culprits.buffers_to_device(bench.model, bench.device)


def run(folder: Path, only: str = "", detail: str = "transitions") -> dict[str, list[dict[str, Any] | None]]:
    """Every scenario (whose name begins with ``only``), each on fresh ranks."""
    results = {}
    for name, (function, ranks, group) in SCENARIOS.items():
        if not name.startswith(only):
            continue

        def work(
            rank: int,
            tell: Callable[[dict[str, Any]], None],
            function: Callable[[Lab], None] = function,
            name: str = name,
        ) -> None:
            lab = Lab(folder / name, rank, detail)
            try:
                function(lab)
            finally:
                tell(lab.answer)

        results[name] = fork_ranks(work, ranks, group=group, loud=bool(only))
    return results
