"""What `test_guard.py` tries on forked ranks of the simulated accelerator: each story on a model of its own.

``python guard_ranks.py OUT`` writes ``OUT/results.json``: what each rank of each story answers, or how it failed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import culprits
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

import diagkit as dk
from diagkit.capture import residency
from diagkit.demo.predictions.bench import DECODER, Bench, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.errors import DiagkitError, MoveBlocked
from diagkit.lab.engines import EngineConfig, FSDPEngine, build_engine
from diagkit.remedy import MoveWarning

STORIES: dict[str, tuple[Callable[[Path], Any], int]] = {}


def story(ranks: int = 1) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def enter(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        STORIES[function.__name__] = (function, ranks)
        return function

    return enter


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except DiagkitError as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def picture(model: nn.Module) -> list[Any]:
    """Everything that a move could change: objects, storages, places."""
    parameters = [(id(p), p._local_tensor.untyped_storage()._cdata, residency(p)) for p in model.parameters()]  # type: ignore[attr-defined]
    buffers = [(id(b), b.untyped_storage()._cdata, str(b.device)) for b in model.buffers()]
    return [parameters, buffers]


def bench(policy: str = "pinned", trained: bool = True) -> Bench:
    made = build(DECODER, policy)
    if trained:
        made.train()
        made.optimizer.zero_grad()
    return made


#: Ways to move a model to the accelerator, each as people write it.
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to": lambda m: m.to("npu"),
    "to, with a cast": lambda m: m.to("npu", torch.bfloat16),
    "to, like a tensor": lambda m: m.to(torch.empty(0, device="npu")),
    "npu": lambda m: m.npu(),
    "to_empty": lambda m: m.to_empty(device="npu"),
    "a child": lambda m: m.get_submodule("layers.0.mlp").to("npu"),
    "one projection": lambda m: m.get_submodule("layers.0.mlp.up").to("npu"),
    "a layer": lambda m: m.get_submodule("layers.0").to("npu"),
    "around it": lambda m: nn.ModuleList([m]).to("npu"),
    "own function": lambda m: m._apply(lambda t: t.to("npu:0")),
}


@story(ranks=2)
def every_way_to_move_is_stopped(folder: Path) -> Any:
    answers = {}
    for policy in ("pinned", "unpinned"):
        made = bench(policy)
        before = picture(made.model)
        with dk.guard(made.model):
            for name, move in MOVES.items():
                answers[f"{policy}: {name}"] = told(functools.partial(move, made.model))
        answers[f"{policy}: nothing changed"] = picture(made.model) == before
    return answers


@story()
def the_message(folder: Path) -> Any:
    made, fresh = bench(), bench(trained=False)
    with dk.guard([made.model, fresh.model]) as guard:
        answer = {
            "whole": told(lambda: culprits.load_model_to_device(made.model, "npu")),
            "child": told(lambda: culprits.move_one_child(made.model, "npu")),
            "early": told(lambda: culprits.load_model_to_device(fresh.model, "npu")),
        }
        answer["repr"] = repr(guard)
    other = bench("unpinned").model
    with dk.guard(other):
        answer["unpinned"] = told(lambda: culprits.load_model_to_device(other, "npu"))
    return answer | {"closed": repr(guard)}


@story()
def what_does_no_harm_passes(folder: Path) -> Any:
    made, plain = bench(), build(DECODER, "none")
    one = FullyShardedDataParallel(nn.Linear(3, 3).to("npu"), use_orig_params=True)
    with dk.guard({"offloaded": made.model, "by hand": plain.model, "fsdp1": one}):
        for step in (
            lambda: made.model.to("cpu"),
            lambda: made.model.cpu(),
            lambda: made.model.load_state_dict(made.weights),
            lambda: culprits.buffers_to_device(made.model, "npu"),
            lambda: [p.to("npu").full_tensor() for p in made.model.parameters()],
            made.train,
            lambda: made.optimizer.load_state_dict(made.moments),
            lambda: made.model.double(),
            lambda: made.model.float(),
            lambda: made.model.to_empty(device="cpu"),
            lambda: made.model._apply(lambda t: t.clone() if t.numel() else 1 / 0),
            lambda: plain.model.to("cpu"),
            lambda: plain.model.to("npu"),
            lambda: one.to("cpu"),
            lambda: one.to("npu"),
            lambda: nn.Linear(2, 2).to("npu"),
        ):
            step()  # type: ignore[no-untyped-call]
    return list(dk.inspect(made.model).findings.codes)


@story(ranks=2)
def skipping_leaves_parameters_and_buffers_and_moves_the_rest(folder: Path) -> Any:
    made = bench()
    made.model.extra = nn.Linear(2, 2)  # outside the policy
    extra, buffer = made.model.extra, made.model.scale
    culprits.buffers_to_device(made.model, "npu")
    before = picture(nn.ModuleList([made.model.layers, made.model.head])), buffer.untyped_storage()._cdata
    with dk.guard(made.model, on_move="skip") as guard:
        same = made.model.to("npu") is made.model and made.model.npu() is made.model
    after = picture(nn.ModuleList([made.model.layers, made.model.head])), made.model.scale.untyped_storage()._cdata
    return {
        "returns the module": same,
        "nothing changed": before == after and made.model.scale is buffer,
        "the rest": (extra.weight.device.type, made.model.extra is extra),
        "stopped": sum(guard.stopped.values()),
    }


@story()
def warning_once_for_each_line(folder: Path) -> Any:
    with warnings.catch_warnings(record=True) as warned, dk.guard(models := [bench().model, bench().model], "warn"):
        warnings.simplefilter("always")
        for model in models:
            culprits.load_model_to_device(model, "npu")
        culprits.move_one_child(models[0], "npu") if models[0].to("cpu") else None
    ours = [w for w in warned if issubclass(w.category, MoveWarning)]
    return {
        "warnings": [(Path(w.filename).name, str(w.message)[:30]) for w in ours],
        "it went on": {str(p.device) for p in models[1].parameters()} == {"npu:0"},
        "codes": [list(dk.inspect(model).findings.codes) for model in models],
    }


@story()
def too_early(folder: Path) -> Any:
    with torch.device("meta"):
        on_meta = DECODER.make()
    fully_shard(on_meta, offload_policy=CPUOffloadPolicy(), mesh=bench().model.head.weight.device_mesh)
    loading = bench(trained=False).model.to("npu")  # as inside an engine's own full-state load
    broken = bench().model.to("npu")  # lazy init has run: no initialisation, and a guard stops the next harm

    class Engine:
        module: nn.Module | None = None

    return {
        "plain": told(lambda: dk.guard(DECODER.make())),
        "meta": told(lambda: dk.guard(on_meta)),
        "loading": told(lambda: dk.guard(loading)),
        "no model yet": told(lambda: dk.guard(Engine())),
        "broken": told(lambda: dk.guard(broken).close()),
        "mode": told(lambda: dk.guard(broken, on_move="stop")),
    }


@story()
def guards_may_be_nested_and_the_last_one_decides(folder: Path) -> Any:
    one, other = bench().model, bench().model
    with dk.guard(one):
        with dk.guard([one, other], "skip"):
            inner = told(lambda: one.to("npu"))
        outer = told(lambda: one.to("npu"))
        free = told(lambda: other.to("npu"))
    return {"inner": inner, "outer": outer.partition(":")[0], "other": free}


@story()
def a_guard_is_in_force_in_every_thread(folder: Path) -> Any:
    model = bench().model
    answers: list[str] = []
    with dk.guard(model):
        threads = [threading.Thread(target=lambda: answers.append(told(lambda: model.to("npu")))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [answer.partition(":")[0] for answer in answers]


@story()
def every_attribute_is_the_identical_object_again(folder: Path) -> Any:
    """Guards, a recorder and an attachment, opened and closed in every order, and an exception inside."""
    import itertools

    from torch.distributed.fsdp import FSDPModule

    engine = build_engine("fsdp", "current", EngineConfig())
    places = [(nn.Module, "_apply"), (FSDPModule, "_apply"), (nn.Module, "state_dict"), (nn.Module, "to")]
    before = [vars(owner)[name] for owner, name in places]
    left = []
    for number, order in enumerate(itertools.permutations(range(4))):
        recording = dk.record(engine.module, out=folder / f"trace{number}")
        things: list[Any] = [dk.guard(engine), recording, dk.attach(engine), dk.guard(engine.module, "skip")]
        with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
            for thing in things:
                thing.__enter__()
            stack.callback(lambda order=order, things=things: [things[n].__exit__(None, None, None) for n in order])  # type: ignore[misc]
            _ = 1 / 0
        left += [name for (owner, name), was in zip(places, before, strict=True) if vars(owner)[name] is not was]
    held = {k for k in vars(engine) if callable(vars(engine)[k]) and k in ("to", "save_checkpoint")}
    return {"left": left, "covers": sorted(held)}


@story()
def a_recorder_tells_who_was_stopped(folder: Path) -> Any:
    made = bench()
    recording = dk.record(made.model, out=folder / "stopped")
    with recording as rec, dk.guard(made.model), contextlib.suppress(MoveBlocked), rec.phase("save"):
        culprits.load_model_to_device(made.model, "npu")
    (failure,) = dk.open_trace(folder / "stopped")[0].failures
    return {
        "type": failure.failure.type,
        "line": failure.cause.frame.code,
        "findings": len(dk.open_trace(folder / "stopped").findings()),
    }


@story()
def a_fault_of_the_guard_lets_the_move_pass(folder: Path) -> Any:
    from diagkit.remedy import guarding

    def faulty(*_: object) -> Any:
        raise LookupError("a fault of ours")

    made = bench()
    with warnings.catch_warnings(record=True) as warned, dk.guard(made.model):
        warnings.simplefilter("always")
        before, guarding.offloaded = guarding.offloaded, faulty
        try:
            answers = [told(functools.partial(made.model.to, device)) for device in ("cpu", "npu")]
        finally:
            guarding.offloaded = before
    return {"answers": answers, "warned": [str(w.message) for w in warned if "diagkit" in str(w.message)]}


@story()
def a_guard_keeps_no_model_alive(folder: Path) -> Any:
    import gc
    import weakref

    class Engine:
        def __init__(self) -> None:
            self.module = bench().model

    made, engine = bench(), Engine()
    guards = [dk.guard(made.model), dk.guard({"a": made.model}), dk.guard([made.model]), dk.guard(engine)]
    held = [weakref.ref(made.model), weakref.ref(engine.module), weakref.ref(engine)]
    del made, engine
    alive = [True]
    for _ in range(50):  # threads of earlier passes may still be letting go; who holds on for good is found out
        gc.collect()
        alive = [ref() is not None for ref in held]
        if not any(alive):
            break
        time.sleep(0.1)
    other = nn.Linear(2, 2).to("npu").weight.device.type
    for guard in guards:
        guard.close()
        guard.close()
    return {"alive": alive, "others move": other, "repr": repr(guards[0])}


# ---- the engines, at the revision of the bug report

OPERATIONS: dict[str, Callable[[FSDPEngine, Path], Any]] = {
    "train": lambda e, f: _train(e),
    "save": lambda e, f: e.save_checkpoint(f / "saved"),
    "load": lambda e, f: e.load_checkpoint(f / "given"),
    "export": lambda e, f: _sums(e.get_per_tensor_param()),
    "to": lambda e, f: e.to("npu", optimizer=False),
    "train again": lambda e, f: _train(e),
}


def _train(engine: FSDPEngine) -> float:
    with engine.train_mode():
        return engine.train_batch()


def _sums(tensors: Any) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in tensors}


def life(engine: FSDPEngine, folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        try:
            answers[name] = operation(engine, folder)
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
    answers["codes"] = list(dk.inspect(engine).findings.codes)
    return answers


@story(ranks=2)
def engines(folder: Path) -> Any:
    answers: dict[str, Any] = {}
    for name in ("fsdp", "veomni"):
        for flags in ({}, {"param_offload": True}):
            config = EngineConfig(**flags)
            build_engine(name, "current", EngineConfig()).save_checkpoint(folder / "given")
            key = f"{name}{' with param_offload' if flags else ''}"
            answers[f"{key}, fixed"] = life(build_engine(name, "current", EngineConfig()), folder)
            for mode in ("raise", "skip"):
                engine = build_engine(name, "before", config)
                with dk.guard(engine, on_move=mode):
                    answers[f"{key}, {mode}"] = life(engine, folder)
            engine = build_engine(name, "before", config)
            with warnings.catch_warnings(record=True) as warned, dk.guard(engine, on_move="warn"):
                warnings.simplefilter("always")
                try:
                    engine.save_checkpoint(folder / "saved")
                except RuntimeError as error:
                    answers[f"{key}, warn"] = [str(error)[:30], *(w.category.__name__ for w in warned)]
    return answers


def main(stories: dict[str, tuple[Callable[[Path], Any], int]]) -> None:
    folder = Path(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    warm_up()
    results: dict[str, Any] = {}
    for name, (function, ranks) in stories.items():
        if not name.startswith(only):
            continue

        def work(rank: int, tell: Callable[[Any], None], function: Any = function, name: str = name) -> None:
            tell({"told": function(folder / name)})

        results[name] = fork_ranks(work, ranks, loud=bool(only))
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(STORIES)
