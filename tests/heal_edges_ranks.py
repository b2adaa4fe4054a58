"""What `test_heal_edges.py` breaks and mends on forked ranks of the simulated accelerator: callers in odd states, odd
optimizers, and repairs that fail half-way.

``python heal_edges_ranks.py OUT [NAME]`` writes ``OUT/results.json``, as `heal_ranks.py` does.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heal_ranks
import torch
from heal_ranks import losses, move, same, told, train
from torch import Tensor, nn

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, Kind, build
from diagkit.demo.predictions.forked import warm_up

STORIES: dict[str, tuple[Callable[[Path, int], Any], int]] = {}


def story(ranks: int = 1) -> Callable[[Callable[[Path, int], Any]], Callable[[Path, int], Any]]:
    def enter(function: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
        STORIES[function.__name__] = (function, ranks)
        return function

    return enter


def trained(kind: Kind = DECODER) -> Bench:
    bench = build(kind, "pinned")
    train(bench)
    bench.optimizer.zero_grad()
    return bench


def moments(bench: Bench) -> Iterator[tuple[Any, str, Any]]:
    """State, key and value of each part of the optimizer's state."""
    for state in bench.optimizer.state.values():
        for key, value in list(state.items()):
            yield state, key, value


# ---- who calls


@story()
def what_is_mended_in_inference_mode_can_be_trained(folder: Path, rank: int) -> Any:
    answers = {}

    def break_everything(bench: Bench) -> None:
        move(bench)
        for state, key, value in moments(bench):
            state[key] = value.to("npu")

    def drag_buffers(bench: Bench) -> None:
        move(bench)
        bench.model.to("cpu")

    for name, kind, breaks in (("all", DECODER, break_everything), ("buffers", STRAIGHT, drag_buffers)):
        bench, like = trained(kind), trained(kind)
        breaks(bench)
        with torch.inference_mode():
            healing = dk.heal(bench.model, bench.optimizer, buffers=kind is STRAIGHT)
        tensors = [*bench.model.parameters(), *bench.model.buffers(), *(value for _, _, value in moments(bench))]
        answers[name] = [
            [step.kind for step in healing.steps],
            any(tensor.is_inference() for tensor in tensors),
            losses(bench) == losses(like),
            same(bench, like),
        ]
    return answers


@story()
def another_thread_is_in_a_pass(folder: Path, rank: int) -> Any:
    bench, like = trained(), trained()
    answers: dict[str, str] = {}

    def heal_elsewhere(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            def work() -> None:
                answers[name] = told(lambda: dk.heal(bench.model, bench.optimizer))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        return hook

    layer = bench.model.get_submodule("layers.0")
    handles = [
        layer.register_forward_hook(heal_elsewhere("forward")),
        layer.register_full_backward_hook(heal_elsewhere("backward")),  # type: ignore[arg-type]
    ]
    train(bench)
    for handle in handles:
        handle.remove()
    train(like)
    heal_elsewhere("at rest")()
    return answers | {"same": losses(bench) == losses(like) and same(bench, like)}


# ---- what is given


class Preconditioned(torch.optim.Optimizer):
    """Keeps lists, tuples and dicts of tensors, as SOAP, Shampoo and LBFGS do."""

    Pair = namedtuple("Pair", "left right")

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                new = lambda: torch.zeros_like(parameter)  # noqa: B023, E731
                state.update(all=[new()], pair=self.Pair(new(), [1]), named={"deep": [new()]}, m=new())
            held = [*state["all"], state["pair"].left, *state["named"]["deep"], state["m"]]
            for tensor in held:
                tensor.add_(parameter.grad)
                parameter.sub_(tensor, alpha=0.001)


@story()
def state_in_lists_tuples_and_dicts(folder: Path, rank: int) -> Any:
    benches = [build(DECODER, "pinned") for _ in range(2)]
    for each in benches:
        each.optimizer = Preconditioned(each.model.parameters())
        train(each)
        each.optimizer.zero_grad()
    bench, like = benches
    for state in bench.optimizer.state.values():
        state["all"][0] = state["all"][0].to("npu")
        state["pair"] = state["pair"]._replace(left=state["pair"].left.to("npu"))
        state["named"]["deep"][0] = state["named"]["deep"][0].to("npu")
    healing = dk.heal(bench.model, bench.optimizer)
    first = next(iter(bench.optimizer.state.values()))
    return {
        "text": repr(healing),
        "types": [type(first["pair"]).__name__, first["pair"].right],
        "again": repr(dk.heal(bench.model, bench.optimizer)),
        "losses": losses(bench) == losses(like),
    }


@story()
def parts_that_share_a_tensor(folder: Path, rank: int) -> Any:
    bench = trained()
    for state in bench.optimizer.state.values():
        state["exp_avg"] = state["alias"] = state["exp_avg"].to("npu")
    healing = dk.heal(bench.model, bench.optimizer)
    states = list(bench.optimizer.state.values())
    return {
        "kinds": [step.kind for step in healing.steps],
        "one": all(state["exp_avg"] is state["alias"] for state in states),
        "apart": len({id(state["exp_avg"]) for state in states}) == len(states),
    }


@story()
def a_fused_step_on_the_device(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.01, fused=True)
    train(bench)
    bench.optimizer.zero_grad()
    born = {str(state["step"].device) for state in bench.optimizer.state.values()}
    for state in bench.optimizer.state.values():
        state["step"] = state["step"].to("npu")
    healing = dk.heal(bench.model, bench.optimizer)
    now = {str(state["step"].device) for state in bench.optimizer.state.values()}
    return {"born": sorted(born), "steps": [step.kind for step in healing.steps], "now": sorted(now)} | {
        "trains": len(losses(bench, 1))
    }


class Wrapped:
    """As training libraries wrap an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@story()
def things_given_for_an_optimizer(folder: Path, rank: int) -> Any:
    given: dict[str, Callable[[Any], Any]] = {
        "itself": lambda o: o,
        "by name": lambda o: {"a": o},
        "a generator": lambda o: (one for one in [o, o]),
        "wrapped": Wrapped,
        "a scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0),
        "a list with nothing in it": lambda o: [o, None],
        "a number": lambda o: 3,
    }
    answers = {}
    for name, make in given.items():
        bench = trained()
        for state, key, value in moments(bench):
            state[key] = value.to("npu")
        answers[name] = told(lambda bench=bench, make=make: dk.heal(bench.model, make(bench.optimizer)))  # type: ignore[misc]
    return answers


@story()
def state_that_is_no_dict(folder: Path, rank: int) -> Any:
    bench = trained()
    first, second, third = list(bench.optimizer.state)[:3]
    bench.optimizer.state[first] = torch.ones(2, device="npu")  # type: ignore[assignment]
    bench.optimizer.state[second] = (torch.ones(2, device="npu"), 1)  # type: ignore[assignment]
    bench.optimizer.state["global"] = 5  # type: ignore[index]
    bench.optimizer.state[third]["step"] = bench.optimizer.state[third]["step"].to("npu")
    healing = told(lambda: dk.heal(bench.model, bench.optimizer))
    state: Any = bench.optimizer.state
    return {"text": healing, "now": [str(state[first].device), str(state[second][0].device), state[second][1]]}


@story()
def models_named_twice(folder: Path, rank: int) -> Any:
    answers = {}
    for name in ("twice", "with a part of it"):
        bench = trained()
        move(bench)
        other = bench.model if name == "twice" else bench.model.get_submodule("layers.0")
        answers[name] = repr(dk.heal({"a": bench.model, "b": other}, [bench.optimizer, bench.optimizer]))
    return answers


# ---- what fails, and who disagrees


@story()
def what_failed_is_not_counted(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    move(bench)
    reference = weakref.ref(bench.model.get_parameter("head.weight"))
    some = dk.heal(bench.model, bench.optimizer)
    only = dk.heal(bench.model, bench.optimizer)
    assert reference() is not None
    del reference
    return {
        "some": some.to_json()["steps"],
        "only": only.to_json()["steps"],
        "codes": [some.codes, only.codes],
        "whole": [some.whole, only.whole],
        "then": repr(dk.heal(bench.model, bench.optimizer)).splitlines()[1],
    }


@story(ranks=2)
def ranks_that_would_mend_other_parameters(folder: Path, rank: int) -> Any:
    bench = trained()
    moved: nn.Module = bench.model.get_submodule(f"layers.{rank}.mlp")
    moved.to("npu")
    before = heal_ranks.picture(bench)
    return {
        "refused": told(lambda: dk.heal(bench.model, bench.optimizer)),
        "same": heal_ranks.picture(bench) == before,
        "alone": told(lambda: dk.heal(bench.model, bench.optimizer, alone=True)).splitlines()[0],
    }


class Small(nn.Module):
    """With a parameter of one element, of which the second of two ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gate(x)  # type: ignore[no-any-return]


@story(ranks=2)
def a_parameter_of_which_one_rank_has_nothing(folder: Path, rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = Small()
    fully_shard(model, mesh=init_device_mesh("npu", (2,)), offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device="npu")).sum().backward()
    optimizer.step()
    heal_ranks.unpin(SimpleNamespace(model=model))  # type: ignore[arg-type]
    return repr(dk.heal(model, optimizer))


if __name__ == "__main__":
    warm_up()
    heal_ranks.tell_stories(STORIES, Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "", {})
