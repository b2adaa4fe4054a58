"""What `test_heal.py` breaks and mends on forked ranks of the simulated accelerator, each case on a model of its own.

``python heal_ranks.py OUT [NAME]`` writes ``OUT/results.json``: what each rank of each case answers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import culprits
import torch
from torch import Tensor, nn

import diagkit as dk
from diagkit.capture import residency
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, Kind, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.errors import DiagkitError
from diagkit.torch_internals import fsdp_state, local_tensor, state_groups

STEPS = 5


@dataclass(frozen=True)
class Case:
    """How a trained bench is broken; ``twin`` is what the one that never broke does meanwhile."""

    breaks: tuple[Callable[[Bench], Any], ...]
    policy: str = "pinned"
    kind: Kind = DECODER
    before: tuple[Callable[[Bench], Any], ...] = ()
    twin: tuple[Callable[[Bench], Any], ...] = ()
    after: tuple[Callable[[Bench], Any], ...] = ()
    group: str = "mixed"
    trained: bool = True


def train(bench: Bench) -> None:
    bench.train()


def backward(bench: Bench) -> None:
    bench.loss().backward()


def train_on(bench: Bench) -> None:
    """As if nothing had happened: torch 2.13 is silent, on 2.9 the forward pass raises."""
    with contextlib.suppress(RuntimeError):
        backward(bench)


def step(bench: Bench) -> None:
    bench.optimizer.step()
    bench.optimizer.zero_grad()


def no_grads(bench: Bench) -> None:
    bench.optimizer.zero_grad()


def move(bench: Bench) -> None:
    culprits.load_model_to_device(bench.model, "npu")


def to_cpu(bench: Bench) -> None:
    culprits.offload_model_to_cpu(bench.model)


def move_child(bench: Bench) -> None:
    culprits.move_one_child(bench.model, "npu")


def hand_split(bench: Bench) -> None:
    culprits.replace_the_local_tensors(bench.model, "npu")


def fails(what: Callable[[Bench], Any]) -> Callable[[Bench], None]:
    def failing(bench: Bench) -> None:
        try:
            what(bench)
        except (RuntimeError, ValueError, AttributeError) as error:
            sys.last_exc = error  # type: ignore[attr-defined]  # as a notebook keeps it
            return
        raise AssertionError(f"{what} was expected to fail")

    return failing


def mistake(*_: object) -> None:
    raise ValueError("a mistake in a user's own hook")


def broken_backward(bench: Bench, part: str = "layers.0") -> None:
    handle = bench.model.get_submodule(part).register_full_backward_hook(mistake)
    try:
        bench.loss().backward()
    finally:
        handle.remove()


def broken_forward(bench: Bench) -> None:
    handle = bench.model.get_submodule("layers.1").register_forward_pre_hook(mistake)
    try:
        bench.loss()
    finally:
        handle.remove()


def forward(bench: Bench) -> None:
    bench.loss()


def load_moments_while_split(bench: Bench) -> None:
    saved = bench.optimizer.state_dict()
    move(bench)
    bench.optimizer.load_state_dict(saved)


def moments_to_device(bench: Bench) -> None:
    for state in bench.optimizer.state.values():
        state.update({key: value.to("npu") for key, value in state.items()})


def split_moments(bench: Bench) -> None:
    """Wrapper on the accelerator, bytes on the CPU: what an offloader that knows one of the two leaves behind."""
    for state in bench.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            moved = state[key].to("npu")
            moved._local_tensor = moved._local_tensor.cpu()
            state[key] = moved


def unpin(bench: Bench) -> None:
    """Both handles on fresh, pageable memory: what unpickling or a copy into a new storage leaves behind."""
    for module in bench.model.modules():
        state = fsdp_state(module)
        for group in state_groups(state) if state is not None else ():
            for record in group.fsdp_params:
                flat = record._sharded_param_data.clone()
                local = record.sharded_param._local_tensor
                record._sharded_param_data = flat
                record.sharded_param._local_tensor = flat[: local.numel()].view(local.shape)


def rebind(bench: Bench) -> None:
    """The local tensor is another one than all-gather reads, and every device looks healthy."""
    for parameter in bench.model.parameters():
        parameter._local_tensor = parameter._local_tensor.clone().pin_memory()  # type: ignore[attr-defined]


CASES: dict[str, Case] = {
    "split": Case((move,)),
    "split before the first forward": Case((move,), trained=False),
    "split with gradients": Case((move,), before=(backward,), twin=(), after=(step,)),
    "split, and a crash while saving": Case((move, fails(lambda b: b.model.state_dict()))),
    "split, and a crash in backward": Case((move, fails(backward)), after=(no_grads,)),
    "split by hand": Case((hand_split,)),
    "wholly moved": Case((move,), policy="unpinned"),
    "wholly moved with gradients": Case((move,), policy="unpinned", before=(backward,), after=(step,)),
    "a child moved past the reset": Case((move_child,)),
    "a child moved before the first forward": Case((move_child,), trained=False),
    "a child moved with gradients": Case((move_child,), before=(backward,), after=(step,)),
    "buffers dragged to the CPU": Case((move, to_cpu, fails(forward)), kind=STRAIGHT),
    "moments loaded while split": Case((load_moments_while_split,)),
    "moments moved by hand": Case((moments_to_device,)),
    "moments split": Case((split_moments,)),
    "poisoned lazy init": Case((move, fails(forward), to_cpu), trained=False),
    "poisoned lazy init, still split": Case((move, fails(forward), fails(forward)), trained=False),
    "aborted backward": Case((fails(broken_backward),)),
    "aborted backward at its end": Case((fails(functools.partial(broken_backward, part="layers.1")), no_grads)),
    "aborted backward, and training went on": Case((fails(broken_backward), train_on, train_on)),
    "aborted forward": Case((fails(broken_forward),)),
    "aborted forward between micro-batches": Case((fails(broken_forward),), before=(backward,), after=(step,)),
    "pins lost": Case((unpin,)),
    "trained and gathered are two": Case((rebind,)),
    "everything at once": Case((fails(broken_backward), load_moments_while_split), kind=STRAIGHT),
    "split, and hccl alone": Case((move,), group="alone"),
}


def losses(bench: Bench, steps: int = STEPS) -> list[float]:
    out = []
    for _ in range(steps):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        loss.backward()
        bench.optimizer.step()
        out.append(float(loss))
    return out


def values(bench: Bench) -> list[Tensor]:
    """All that training has made of it: weights and moments."""
    tensors = [*bench.model.parameters(), *(v for s in bench.optimizer.state.values() for v in s.values())]
    return [(t if (local := local_tensor(t)) is None else local).clone() for t in tensors]


def same(bench: Bench, like: Bench) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(bench), values(like), strict=True))


def picture(bench: Bench) -> list[Any]:
    """Objects, storages and places of everything."""
    tensors = [*bench.model.parameters(), *(p.grad for p in bench.model.parameters() if p.grad is not None)]
    tensors += [v for s in bench.optimizer.state.values() for v in s.values()]
    shown = [(id(t), (t if (local := local_tensor(t)) is None else local).untyped_storage()._cdata) for t in tensors]
    return [shown, [residency(t) for t in tensors], [(id(b), b.data_ptr(), b.device) for b in bench.model.buffers()]]


def run(case: Case) -> dict[str, Any]:
    bench, like = (build(case.kind, case.policy) for _ in range(2))
    for each in (bench, like):
        for act in ((train, no_grads) if case.trained else ()) + case.before:
            act(each)
    for act in case.breaks:
        act(bench)
    for act in case.twin:
        act(like)
    parameters = list(bench.model.parameters())
    held = [p for group in bench.optimizer.param_groups for p in group["params"]]
    plan = dk.heal(bench.model, bench.optimizer, dry_run=True)
    healing = dk.heal(bench.model, bench.optimizer)
    answer: dict[str, Any] = {"text": repr(healing), "html": healing._repr_html_(), "json": healing.to_json()}
    answer["planned"] = plan.to_json()["steps"] == healing.to_json()["steps"]
    now = list(bench.model.parameters())
    answer["the same objects"] = {id(p) for p in now} == {id(p) for p in held} and len(parameters) == len(now)
    sys.last_exc = None  # type: ignore[attr-defined]
    before = picture(bench)
    again = dk.heal(bench.model, bench.optimizer)
    answer["again"] = (repr(again), picture(bench) == before)
    answer["codes after"] = list(dk.inspect(bench.model, bench.optimizer).findings.codes)
    for each in (bench, like):
        for act in case.after:
            act(each)
    answer["values"] = same(bench, like)
    answer["losses"] = losses(bench) == losses(like)
    answer["values at the end"] = same(bench, like)
    answer["saved"] = len(bench.model.state_dict()) == len(like.model.state_dict())
    return answer


# ---- stories that are no table


STORIES: dict[str, tuple[Callable[[Path, int], Any], int]] = {}


def story(ranks: int = 1) -> Callable[[Callable[[Path, int], Any]], Callable[[Path, int], Any]]:
    def enter(function: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
        STORIES[function.__name__] = (function, ranks)
        return function

    return enter


def told(call: Callable[[], object]) -> str:
    try:
        return repr(call())
    except DiagkitError as error:
        return f"{type(error).__name__}: {error}"


@story(ranks=2)
def a_healthy_model_is_not_touched(folder: Path, rank: int) -> Any:
    answers = {}
    for policy in ("pinned", "unpinned", "none"):
        bench = build(DECODER, policy)
        for name, act in (("new", no_grads), ("trained", train), ("between backward and step", backward)):
            act(bench)
            before = picture(bench)
            answers[f"{policy}, {name}"] = (repr(dk.heal(bench.model, bench.optimizer)), picture(bench) == before)
    return answers


@story(ranks=2)
def a_dry_run_touches_nothing_and_asks_nobody(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    move(bench)
    before = picture(bench)
    if rank == 0:  # alone, and at once
        return {"text": repr(dk.heal(bench.model, bench.optimizer, dry_run=True)), "same": picture(bench) == before}
    return None


@story(ranks=2)
def ranks_that_disagree_touch_nothing(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    if rank == 0:
        moved = bench.model
        moved.to("npu")
    before = picture(bench)
    answer = {"refused": told(lambda: dk.heal(bench.model, bench.optimizer)), "same": picture(bench) == before}
    answer["alone"] = told(lambda: dk.heal(bench.model, bench.optimizer, alone=True)).splitlines()[0]
    answer["together"] = told(lambda: dk.heal(bench.model, bench.optimizer)).splitlines()[0]
    return answer | {"losses": len(losses(bench, 2))}


@story(ranks=2)
def a_rank_that_does_not_call_costs_the_others_a_timeout(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    move(bench)
    answer: dict[str, Any] = {}
    for silent in (1, 0):
        if rank != silent:
            answer["refused"] = told(lambda: dk.heal(bench.model, bench.optimizer, timeout=0.3))
        torch.distributed.barrier()
    return answer | {"then": told(lambda: dk.heal(bench.model, bench.optimizer)).splitlines()[0]}


@story()
def heal_is_refused_inside_a_pass(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    answers: dict[str, str] = {}
    layer = bench.model.get_submodule("layers.0")

    def in_forward(*_: object) -> None:
        answers["forward"] = told(lambda: dk.heal(bench.model))

    def in_backward(*_: object) -> None:
        answers["backward"] = told(lambda: dk.heal(bench.model))

    handles = [layer.register_forward_hook(in_forward), layer.register_full_backward_hook(in_backward)]
    train(bench)
    for handle in handles:
        handle.remove()
    return answers


@story()
def what_it_cannot_mend_it_leaves_and_says_so(folder: Path, rank: int) -> Any:
    on_meta = build(DECODER, "pinned", on_meta=True)
    bench = build(DECODER, "pinned")
    train(bench)
    move(bench)
    bench.optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(37, 11))
    weak = build(DECODER, "pinned")
    train(weak)
    move(weak)
    import weakref

    reference = weakref.ref(weak.model.get_parameter("head.weight"))
    answer = {
        "meta": repr(dk.heal(on_meta.model, on_meta.optimizer)),
        "dead": repr(dk.heal(bench.model, bench.optimizer)),
        "weakly held": repr(dk.heal(weak.model, weak.optimizer)),
        "nothing": told(lambda: dk.heal(3)),
    }
    assert reference() is not None
    return answer


@story()
def values_that_differ_are_told(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    move_child(bench)
    with torch.no_grad():
        for parameter in bench.model.get_submodule("layers.0.mlp").parameters():
            parameter.mul_(2.0)
    kept = values(bench)
    healing = dk.heal(bench.model, bench.optimizer)
    return {
        "text": repr(healing),
        "kept": all(torch.equal(a.cpu(), b) for a, b in zip(kept, values(bench), strict=True)),
    }


@story()
def buffers_that_rest_on_the_cpu_stay_unless_one_asks(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    bench.model.get_buffer("scale").data = bench.model.get_buffer("scale").to("cpu")
    train(bench)
    first = repr(dk.heal(bench.model, bench.optimizer))
    at_rest = str(bench.model.get_buffer("scale").device)
    second = repr(dk.heal(bench.model, bench.optimizer, buffers=True))
    return {"first": first, "at rest": at_rest, "second": second, "then": str(bench.model.get_buffer("scale").device)}


@story(ranks=2)
def engines(folder: Path, rank: int) -> Any:
    """The engine of the bug report saves after its model was mended, without being built again."""
    from diagkit.lab.engines import EngineConfig, build_engine

    answers = {}
    for name in ("fsdp", "veomni"):
        engine, fixed = (build_engine(name, revision, EngineConfig()) for revision in ("before", "current"))
        with contextlib.suppress(RuntimeError):
            engine.save_checkpoint(folder / "saved")
        healing = dk.heal(engine)
        first = [each.train_batch(1) for each in (engine, fixed)]
        with dk.guard(engine, on_move="skip"):
            engine.save_checkpoint(folder / "saved")
        answers[name] = [list(healing.codes), first[0] == first[1], [f.code for f in healing.left]]
    return answers


@story()
def a_trace_tells_who_mended(folder: Path, rank: int) -> Any:
    bench = build(DECODER, "pinned")
    train(bench)
    with dk.record(bench.model, bench.optimizer, out=folder) as rec, rec.phase("mend"):
        move(bench)
        no_grads(bench)
        dk.heal(bench.model, bench.optimizer)
    trace = dk.open_trace(folder)[0]
    mended = [t for t in trace.transitions() if t.cause is not None and t.cause.operation == "dk.heal"]
    return {
        "parameters": sum(len(t.rows) for t in mended),
        "from": sorted({t.before.short() for t in mended}),
        "to": sorted({t.after.short() for t in mended}),
        "line": mended[0].cause.frame.code,
        "chain": mended[0].cause.chain[-1],
        "troubles": trace.troubles,
        "at the end": [f.code for f in dk.open_trace(folder).findings() if f.lasting],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    warm_up()
    results: dict[str, Any] = {}

    def cases(rank: int, tell: Callable[[Any], None], names: list[str]) -> None:
        found: dict[str, Any] = {}
        for name in names:
            try:
                found[name] = run(CASES[name])
            except Exception as error:  # the next case has a model of its own
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            tell(found)

    for group in ("mixed", "alone"):
        names = [name for name, case in CASES.items() if case.group == group and name.startswith(only)]
        for ranks in (1, 2) if names else ():
            answers = fork_ranks(
                functools.partial(cases, names=names), ranks, group=group, timeout=240, loud=bool(only)
            )
            results.update(
                {
                    f"{name} on {ranks}": [(a or {}).get(name) or (a or {}).get("error") for a in answers]
                    for name in names
                }
            )
    tell_stories(STORIES, folder, only, results)


def tell_stories(
    stories: dict[str, tuple[Callable[[Path, int], Any], int]], folder: Path, only: str, results: dict[str, Any]
) -> None:
    """Adds to the results what each rank of each story answers, and writes them down."""
    for name, (function, ranks) in stories.items():
        if not name.startswith(only):
            continue

        def work(rank: int, tell: Callable[[Any], None], function: Any = function, name: str = name) -> None:
            tell({"told": function(folder / name, rank)})

        results[name] = fork_ranks(work, ranks, loud=bool(only))
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
