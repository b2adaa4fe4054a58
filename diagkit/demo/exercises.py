"""Exercises for the what-if laboratory: a task, what an answer must keep to, and what must come of it on real ranks.

Rules of this module: an answer is judged by the run alone, never compared with a solution, so every answer that does
what the task asks is right. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from diagkit.demo.experiments import REVISIONS
from diagkit.demo.scenario import Life, Scenario

__all__ = ["EXERCISES", "Exercise", "Judgement"]

_GUARDED_SINCE = {
    ("fsdp", "export"): "#6463",
    ("fsdp", "save"): "#6604",
    ("veomni", "export"): "#7103",
    ("veomni", "save"): "#7103",
}


@dataclass(frozen=True)
class Judgement:
    """An answer, judged point by point. It is true where every point is met."""

    task: str
    points: tuple[tuple[str, bool], ...]

    def __bool__(self) -> bool:
        return all(met for _, met in self.points)

    def __str__(self) -> str:
        lines = [f"{'yes' if met else 'NO ':3} {text}" for text, met in self.points]
        return "\n".join([self.task, *lines, "Solved." if self else "Not yet."])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class Exercise:
    """``keeps`` are the task's terms for the scenario, ``reaches`` those for what came of it, each with its words."""

    task: str
    keeps: tuple[tuple[str, Callable[[Scenario], bool]], ...]
    reaches: tuple[tuple[str, Callable[[Life], bool]], ...]

    def judge(self, life: Life) -> Judgement:
        """Hold a run against the task."""
        kept = [(words, holds(life.scenario)) for words, holds in self.keeps]
        reached = [(words, holds(life)) for words, holds in self.reaches]
        return Judgement(self.task, (*kept, *reached))


def _outcomes(life: Life, step: str) -> list[str]:
    """What came of every step of this kind, in order."""
    return [step_.outcome for step_ in life.steps if step_.name.partition(" ")[0] == step]


def _guarded(operation: str) -> tuple[str, Callable[[Scenario], bool]]:
    def holds(scenario: Scenario) -> bool:
        since = _GUARDED_SINCE[scenario.engine, operation]
        return REVISIONS.index(scenario.revision) >= REVISIONS.index(since) and not scenario.without

    return f"the revision guards {operation}, and nothing is taken out of it", holds


def _mended(saves: list[str]) -> bool:
    return saves[:1] == ["crash"] and saves[-1:] == ["ok"]


def _fails_after(life: Life, first: str, then: str) -> bool:
    """Whether a step of the second kind fails somewhere after one of the first kind has worked."""
    kinds = [(step.name.partition(" ")[0], step.outcome) for step in life.steps]
    return any(
        kind == first and outcome == "ok" and (then, "crash") in kinds[place + 1 :]
        for place, (kind, outcome) in enumerate(kinds)
    )


_POLICY = ("the engine is under CPUOffloadPolicy", lambda scenario: scenario.offload_policy)
_UNGUARDED = ("the revision is `before`", lambda scenario: scenario.revision == "before")

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "Make the export crash with the guard on.",
        (_POLICY, _guarded("export")),
        (("an export crashes", lambda life: "crash" in _outcomes(life, "export")),),
    ),
    Exercise(
        "Let the unguarded engine save under the policy without a crash, and pay for it later.",
        (_POLICY, _UNGUARDED),
        (
            ("every save works", lambda life: set(_outcomes(life, "save")) == {"ok"}),
            ("a train step after a save crashes", lambda life: _fails_after(life, "save", "train")),
        ),
    ),
    Exercise(
        "Let a save crash with the guard on, mend the model by hand, and save again.",
        (_POLICY, _guarded("save")),
        (("the first save crashes and the last one works", lambda life: _mended(_outcomes(life, "save"))),),
    ),
    Exercise(
        "Make the current code crash in its first train step, without a move of yours.",
        (
            _POLICY,
            ("the revision is `current`", lambda scenario: scenario.revision == "current" and not scenario.without),
            ("train is the first step", lambda scenario: scenario.steps[:1] == ("train",)),
        ),
        (("the train step crashes", lambda life: life.first_failure == "train"),),
    ),
)
"""In the order in which notebook 4 sets them."""
