"""What must stay silent: healthy states that look odd, and both engines at every revision, at every detail.

``python healthy_ranks.py OUT [ONLY]`` writes ``OUT/results.json``: per scenario and rank, what live looks said; traces
are in ``OUT/NAME/DETAIL``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from healthy_jobs import JOBS, Wrapped, live
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit.capture import Recorder, start
from diagkit.demo.expected import expected
from diagkit.demo.experiments import Experiment
from diagkit.demo.predictions.bench import DECODER, Bench, buffers_to, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.demo.predictions.models import Decoder
from diagkit.lab.engines import ENGINES, REVISIONS, EngineConfig, FSDPEngine, revision
from diagkit.trace.schema import DETAILS

GROUPS = {"mixed": "cpu:gloo,npu:hccl", "alone": "hccl"}


@dataclass
class Watch:
    """Records a scenario at every detail at once, and looks at it live."""

    folder: Path
    answer: dict[str, Any] = field(default_factory=dict)
    recorders: list[Recorder] = field(default_factory=list)

    def begin(self, model: Any = None, optimizer: Any = None, engine: Any = None) -> None:
        self.recorders = [start(model, optimizer, out=self.folder / d, detail=d, engine=engine) for d in DETAILS]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for recorder in self.recorders:
                stack.enter_context(recorder.phase(name))
            yield

    def look(self, label: str, *what: Any) -> None:
        found = dk.inspect(*what)
        self.answer[label] = list(found.findings.codes)
        self.answer[f"{label} notes"] = list(found.notes)
        self.answer[f"{label} problems"] = list(found.findings.problems)

    def end(self) -> None:
        for recorder in self.recorders:
            recorder.close()


Scenario = Callable[[Watch], None]
SCENARIOS: dict[str, tuple[Scenario, int, str]] = {}


def scenario(ranks: int = 1, group: str = "mixed") -> Callable[[Scenario], Scenario]:
    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, ranks, group)
        return function

    return enter


def _train(watch: Watch, bench: Bench) -> None:
    with watch.phase("train"):
        bench.train()
        nn.utils.clip_grad_norm_(list(bench.model.parameters()), 1.0)
    watch.look("trained", bench.model, bench.optimizer)
    with watch.phase("save"):
        bench.model.state_dict()
        bench.optimizer.state_dict()
    with watch.phase("eval"), torch.no_grad():
        bench.loss()
    watch.look("evaluated", bench.model, bench.optimizer)


@scenario(ranks=2)
def pinned_policy(watch: Watch) -> None:
    """cpu/cpu on an accelerator mesh, buffers on the accelerator, grads None and there."""
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    watch.look("new", bench.model, bench.optimizer)
    _train(watch, bench)
    bench.optimizer.zero_grad()
    watch.look("without gradients", bench.model, bench.optimizer)


@scenario(ranks=2)
def looked_at_by_a_monitor(watch: Watch) -> None:
    """Another thread looks in the middle of a pass."""
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)

    def look(label: str) -> None:
        monitor = threading.Thread(target=watch.look, args=(label, bench.model, bench.optimizer))
        monitor.start()
        monitor.join()

    def in_forward(module: nn.Module, inputs: object, output: Tensor) -> None:
        look("in forward")
        output.register_hook(lambda gradient: look("in backward"))

    with bench.model.get_submodule("layers.0").register_forward_hook(in_forward):
        bench.train()
    watch.answer["looks"] = [label for label in watch.answer if label.startswith("in ") and " " not in label[3:]]
    _train(watch, bench)


@scenario()
def unpinned_policy(watch: Watch) -> None:
    bench = build(DECODER, "unpinned")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)


@scenario()
def root_left_gathered(watch: Watch) -> None:
    """After a no-grad forward the root's parameters are plain tensors on the accelerator."""
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    with watch.phase("eval"), torch.no_grad():
        bench.loss()
    slots = bench.model.get_submodule("embed")._parameters["weight"]
    watch.answer["plain in the slot"] = type(slots).__name__ == "Parameter" and slots.device.type == "npu"
    watch.look("gathered", bench.model, bench.optimizer)


@scenario(ranks=2)
def one_visible_device(watch: Watch) -> None:
    """Every rank says index 0, as under Ray, which shows each worker one device of its own."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(dist.get_rank())
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)


@scenario()
def buffers_always_on_the_cpu(watch: Watch) -> None:
    bench = build(DECODER, "pinned")
    buffers_to(bench.model, "cpu")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)


@scenario(ranks=2)
def export_copies(watch: Watch) -> None:
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    with watch.phase("export"):
        tensors: Iterator[tuple[str, Any]] = (
            (name, cast(DTensor, value.to("npu")).full_tensor() if isinstance(value, DTensor) else value)
            for name, value in bench.model.state_dict().items()
        )
        for recorder in watch.recorders:
            tensors = recorder.exported(tensors)
        watch.answer["exported"] = sorted({t.device.type for _, t in tensors})
    watch.look("exported looks", bench.model, bench.optimizer)


class _WithGate(Decoder):
    """One row, of which the second rank gets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(11, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out * self.gate(self.embed(tokens)).sigmoid()


@scenario(ranks=2)
def nothing_on_this_rank(watch: Watch) -> None:
    bench = build(replace(DECODER, make=_WithGate), "pinned")
    watch.begin(bench.model, bench.optimizer)
    local = bench.model.get_parameter("gate.weight").to_local()  # type: ignore[operator]
    watch.answer["elements"] = local.numel()
    _train(watch, bench)


@scenario(ranks=2)
def two_dimensional_mesh(watch: Watch) -> None:
    mesh = init_device_mesh("npu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    buffers_to(model, "npu")
    bench = Bench(model, torch.optim.AdamW(model.parameters()), DECODER, "npu")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)


@scenario(ranks=2)
def moved_by_hand_without_the_policy(watch: Watch) -> None:
    bench = build(DECODER, "none")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)
    for label, device in (("offloaded", "cpu"), ("reloaded", "npu")):
        with watch.phase("move"):
            bench.model.to(device)
            for state in bench.optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items() if key != "step"})
        watch.look(label, bench.model, bench.optimizer)
    with watch.phase("train"):
        bench.train()


@scenario(ranks=2)
def fsdp1_moved_by_hand(watch: Watch) -> None:
    with torch.device("npu"):
        inner = Decoder()
    where = torch.device("npu", dist.get_rank())
    model = FullyShardedDataParallel(inner, device_id=where, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    bench = Bench(model, optimizer, DECODER, "npu")
    watch.begin(model, optimizer)
    with watch.phase("train"):
        bench.train()
    optimizer.zero_grad()
    for label, device in (("offloaded", "cpu"), ("reloaded", "npu")):
        with watch.phase("move"):
            model.to(device)
        watch.look(label, model, optimizer)


@scenario(ranks=2)
def cpu_mesh(watch: Watch) -> None:
    bench = build(DECODER, "none", device="cpu")
    watch.begin(bench.model, bench.optimizer)
    _train(watch, bench)


@scenario()
def split_for_a_moment(watch: Watch) -> None:
    """Inside an initialisation that ends healthy, and inside a block of any name."""
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    for name in ("init", "somebody's own"):
        with watch.phase(name):
            bench.model.to("npu")
            bench.model.to("cpu")
            buffers_to(bench.model, "npu")
    _train(watch, bench)


@scenario()
def a_failure_that_has_nothing_to_do_with_it(watch: Watch) -> None:
    bench = build(DECODER, "pinned")
    watch.begin(bench.model, bench.optimizer)
    with contextlib.suppress(ValueError), watch.phase("data"):
        raise ValueError("the file is corrupt")
    _train(watch, bench)


@scenario(ranks=2)
def shards_in_wrappers(watch: Watch) -> None:
    """What FSDP2 shards is a tensor subclass: its claims are its own, and its bytes are those inside."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(Wrapped(model[0].weight.detach()))
    offload = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model, mesh=init_device_mesh("npu", (dist.get_world_size(),)), offload_policy=offload)
    watch.begin(model)
    with watch.phase("eval"), torch.no_grad():
        model(torch.zeros(2, 8, device="npu", dtype=torch.bfloat16))
    model.reshard()
    watch.look("evaluated", model)


for _job_name, _make_job in JOBS.items():
    SCENARIOS[_job_name] = (lambda watch, make=_make_job: live(watch, make()), 2, "mixed")

# ---- engines


def _engine_life(engine_name: str, rev: str, flags: str, group: str) -> Scenario:
    """Construction and every operation that succeeds at this revision, one after the other on one engine."""

    def life(watch: Watch) -> None:
        manual = flags in ("both", "manual")
        config = EngineConfig(offload_policy=flags != "manual", param_offload=manual, optimizer_offload=manual)
        engine = ENGINES[engine_name](config, revision(rev), "npu")
        watch.begin()
        load, make = engine._load_full_state, engine._build_optimizer

        def load_watched(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            for recorder in watch.recorders:
                recorder.watch(module)
            load(module, *args, **kwargs)

        def make_watched() -> None:
            for recorder in watch.recorders:
                recorder.watch(engine.module)
            make()
            for recorder in watch.recorders:
                recorder.watch(optimizer=engine.optimizer)

        engine._load_full_state, engine._build_optimizer = load_watched, make_watched  # type: ignore[method-assign]
        with watch.phase("init"):
            engine.initialize()
        for recorder in watch.recorders:
            recorder.watch(engine=engine)
        watch.look("new", engine.module, engine.optimizer)
        done = []
        for operation in ("train", "save", "load", "export"):
            cell = Experiment(engine_name, rev, operation, flags, GROUPS[group])
            if expected(cell).failure is not None or (operation == "load" and "save" not in done):
                continue
            with watch.phase(operation):
                _operate(engine, operation, watch.folder)
            done.append(operation)
            watch.look(operation, engine.module, engine.optimizer)
        watch.answer["done"] = done

    return life


def _operate(engine: FSDPEngine, operation: str, folder: Path) -> None:
    if operation == "train":
        with engine.train_mode():
            engine.train_batch()
    elif operation == "save":
        engine.save_checkpoint(folder / "checkpoint")
    elif operation == "load":
        engine.load_checkpoint(folder / "checkpoint")
    else:
        for _ in engine.get_per_tensor_param():
            pass


for _name, _rev, _flags, _group in itertools.product(
    ENGINES, [r if isinstance(r, str) else r.name for r in REVISIONS], ("policy", "both", "manual"), GROUPS
):
    if _group == "mixed" or _flags == "policy":
        _slug = f"engine_{_name}_{_rev.removeprefix('#')}_{_flags}_{_group}"
        SCENARIOS[_slug] = (_engine_life(_name, _rev, _flags, _group), 2 if _group == "alone" else 1, _group)


def run(folder: Path, only: str = "") -> dict[str, list[dict[str, Any] | None]]:
    """Every scenario whose name holds ``only``, each on fresh ranks."""
    results = {}
    for name, (function, ranks, group) in SCENARIOS.items():
        if only not in name:
            continue

        def work(
            rank: int, tell: Callable[[dict[str, Any]], None], function: Scenario = function, name: str = name
        ) -> None:
            watch = Watch(folder / name)
            try:
                function(watch)
                dist.barrier()
                watch.end()
            finally:
                tell(watch.answer)

        results[name] = fork_ranks(work, ranks, group=group, loud=bool(only))
    return results


def main() -> None:
    folder = Path(sys.argv[1])
    warm_up()
    started = time.monotonic()
    results = run(folder, *sys.argv[2:])
    (folder / "results.json").write_text(json.dumps(results))
    print(f"{len(results)} scenarios in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
