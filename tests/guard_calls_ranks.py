"""What `test_guard_calls.py` tries on forked ranks of the simulated accelerator: calls of `_apply` that are not plain.

``python guard_calls_ranks.py OUT [NAME]`` writes ``OUT/results.json``, as `guard_ranks.py` does.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guard_ranks
import torch
from guard_ranks import bench, picture, told
from torch import nn

import diagkit as dk
from diagkit.capture import gates
from diagkit.remedy import offloaded

STORIES: dict[str, tuple[Callable[[Path], Any], int]] = {}


def story(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    STORIES[function.__name__] = (function, 1)
    return function


def short(call: Callable[[], object]) -> str:
    return told(call).partition(":")[0]


class Beside(nn.Module):
    """A model, a parameter and a layer of one's own around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.layer, self.own = model, nn.Linear(2, 2), nn.Parameter(torch.ones(2))


class Hiding(nn.Module):
    """Keeps a model out of its children, and takes it along wherever it goes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hidden = [model]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.hidden[0]._apply(fn)
        return self


@story
def a_closed_guard_that_is_entered_again(folder: Path) -> Any:
    made = bench()
    guard = dk.guard(made.model)
    answers = []
    for _ in range(2):
        with guard:
            with guard:
                answers.append(short(lambda: made.model.to("npu")))
            answers.append(short(lambda: made.model.to("npu")))
        answers.append(repr(guard).splitlines()[0])
    made.model = nn.Linear(1, 1)
    gc.collect()
    return {"answers": answers, "without its model": told(guard.__enter__)}


@story
def a_guard_that_nobody_holds(folder: Path) -> Any:
    model = bench().model
    dk.guard(model)
    gc.collect()
    return short(lambda: model.to("npu"))


@story
def a_module_that_forwards_the_call_to_one_that_it_hides(folder: Path) -> Any:
    model = bench().model
    before = picture(model)
    answers = {}
    with dk.guard(model):
        for name, wrapper in {
            "itself": Hiding(model),
            "a child": nn.Sequential(nn.Linear(2, 2), Hiding(model)),
        }.items():
            answers[name] = short(lambda wrapper=wrapper: wrapper.to("npu"))  # type: ignore[misc]
            answers[f"{name}, own function"] = short(lambda wrapper=wrapper: wrapper._apply(lambda t: t.to("npu")))  # type: ignore[misc]
    return answers | {"nothing changed": picture(model) == before}


@story
def a_parameter_in_a_slot_that_fsdp_does_not_know(folder: Path) -> Any:
    answers = {}
    for mode in ("raise", "skip"):
        made = bench()
        alias = nn.Linear(1, 1)
        alias.weight = made.model.get_submodule("head").weight  # type: ignore[assignment]
        around = nn.ModuleList([made.model, alias])
        before = picture(made.model)
        with dk.guard(made.model, on_move=mode) as guard:
            answers[mode] = [told(lambda alias=alias: alias.to("npu")), short(lambda around=around: around.to("npu"))]  # type: ignore[misc]
        answers[f"{mode}, stopped"] = sum(guard.stopped.values())
        answers[f"{mode}, the rest"] = alias.bias.device.type
        answers[f"{mode}, nothing changed"] = picture(made.model) == before
    return answers


@story
def a_call_for_a_module_alone(folder: Path) -> Any:
    answers = {}
    for mode in ("raise", "skip"):
        around = Beside(bench().model)
        with dk.guard(around, on_move=mode) as guard:
            told_of = [short(lambda around=around: around.to_empty(device="npu", recurse=False))]  # type: ignore[misc]
            layer = around.model.get_submodule("layers.0.mlp.up")
            told_of.append(short(lambda layer=layer: layer.to_empty(device="npu", recurse=False)))  # type: ignore[misc]
        answers[mode] = [*told_of, around.own.device.type, around.layer.weight.device.type, len(guard.stopped)]
    return answers


@story
def a_function_of_the_users_own(folder: Path) -> Any:
    answers: dict[str, Any] = {}
    made = bench()
    calls: list[int] = []

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.numel())
        return tensor

    made.model._apply(counting)
    bare, calls = calls, []
    with dk.guard(made.model):
        made.model._apply(counting)
    answers["called"] = calls == bare
    before = picture(made.model)
    by_content: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.to("npu") if t.numel() else t  # noqa: E731
    with dk.guard(made.model):
        answers["raise"] = told(lambda: made.model._apply(by_content))
    answers["nothing changed"] = picture(made.model) == before
    made.loss().backward()
    made.model.extra = nn.Linear(2, 2)
    with dk.guard(made.model, on_move="skip") as guard:
        made.model._apply(lambda t: t.to("npu", torch.float64))
    answers["skip"] = [dk.inspect(made.model, made.optimizer).findings.codes, sum(guard.stopped.values())]
    answers["stayed"] = sorted({(str(t.device), str(t.dtype)) for p in _policy(made) for t in (p, p.grad)})
    answers["went"] = [made.model.extra.weight.device.type, str(made.model.extra.weight.dtype)]
    return answers


@story
def a_fault_of_the_guard_in_a_watched_call(folder: Path) -> Any:
    from diagkit.remedy import moves

    def faulty(*_: object) -> Any:
        raise LookupError("a fault of ours")

    made = bench()
    with warnings.catch_warnings(record=True) as warned, dk.guard(made.model):
        warnings.simplefilter("always")
        before, moves.from_stack = moves.from_stack, faulty
        try:
            answer = told(lambda: made.model._apply(lambda t: t.to("npu")))
        finally:
            moves.from_stack = before
    return [answer, *(str(w.message) for w in warned if "diagkit" in str(w.message))]


def _policy(made: Any) -> list[Any]:
    return [p for group in made.optimizer.param_groups for p in group["params"]]


@story
def a_move_with_a_cast_is_half_skipped(folder: Path) -> Any:
    made = bench()
    made.model.extra = nn.Linear(2, 2)
    scale = made.model.get_buffer("scale")
    with dk.guard(made.model, on_move="skip"):
        made.model.to("npu", torch.bfloat16)
    return {
        "policy": sorted({f"{p.device} {p.dtype}" for p in _policy(made)}),
        "others": f"{made.model.extra.weight.device.type} {made.model.extra.weight.dtype}",
        "buffers": [made.model.get_buffer("scale").device == scale.device, str(made.model.get_buffer("scale").dtype)],
        "codes": dk.inspect(made.model).findings.codes,
    }


@story
def how_often_the_models_are_looked_through(folder: Path) -> Any:
    """Counted, not timed: groups whose facts are read."""
    made = bench()
    read: list[int] = []
    facts = offloaded.group_facts

    def counted(state: Any, group: Any) -> Any:
        read.append(1)
        return facts(state, group)

    answers = {}
    offloaded.group_facts = counted
    try:
        with dk.guard(made.model):
            for name, move in {
                "a layer to the CPU": lambda: made.model.get_submodule("layers.0").to("cpu"),
                "a cast": lambda: made.model.float(),
                "a stranger": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("npu"),
                "a layer to the device": lambda: told(lambda: made.model.get_submodule("layers.0").to("npu")),
            }.items():
                read.clear()
                move()
                answers[name] = len(read)
    finally:
        offloaded.group_facts = facts
    return answers


@story
def a_strangers_parts_are_not_asked_about_one_by_one(folder: Path) -> Any:
    asked: list[str] = []

    def counting(module: nn.Module, fn: Any, recurse: bool) -> None:
        asked.append(type(module).__name__)

    with dk.guard(bench().model):
        gates.add(counting)
        try:
            nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)).to("npu")
        finally:
            gates.remove(counting)
    return asked


if __name__ == "__main__":
    guard_ranks.main(STORIES)
