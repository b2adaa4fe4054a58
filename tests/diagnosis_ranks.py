"""Every hazard of the catalogue, really brought about on forked ranks of the simulated accelerator, and mended.

``python diagnosis_ranks.py OUT`` runs all scenarios and writes ``OUT/results.json``; traces are in ``OUT/NAME``.
A scenario has a phase per step; "remedy" does what the rule's text says, and "after" proves that it cured.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import culprits

import diagkit as dk
from diagkit.capture import Recorder
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.demo.predictions.models import Decoder

SCENARIOS: dict[str, tuple[Callable[[Lab], None], int, str]] = {}


def scenario(ranks: int = 1, group: str = "mixed") -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    def enter(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        SCENARIOS[function.__name__] = (function, ranks, group)
        return function

    return enter


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
            losses = _losses(bench)
        moved = all(p.grad is not None for p in bench.optimizer.param_groups[0]["params"])
        self.answer["losses"] = losses
        self.answer["cured"] = moved and (like is None or losses == _losses(like))
        self.look("after", bench)


def _losses(bench: Bench) -> list[float]:
    out = []
    for _ in range(2):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        loss.backward()
        bench.optimizer.step()
        bench.model.state_dict()
        out.append(float(loss))
    return out


def _mend(bench: Bench) -> None:
    culprits.offload_model_to_cpu(bench.model)
    culprits.buffers_to_device(bench.model, bench.device)


# ---- hazards


@scenario(ranks=2)
def dk101(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.look("live", bench)
        inspection = dk.inspect(bench.model, bench.optimizer)
        lab.answer["text"], lab.answer["html"] = repr(inspection), inspection._repr_html_()
        lab.fails(rec, "save", bench.model.state_dict)
        with rec.phase("remedy"):
            _mend(bench)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk101_inside_save(lab: Lab) -> None:
    """The move is inside the phase that fails: `engine.save_checkpoint` before its guard."""
    bench = build(DECODER, "pinned")

    def save_checkpoint() -> None:
        culprits.load_model_to_device(bench.model, "npu")
        bench.model.state_dict()

    with lab.recorded(bench) as rec:
        lab.fails(rec, "save", save_checkpoint)


@scenario(ranks=2)
def dk102(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    for b in (bench, like):
        b.train()
        b.optimizer.zero_grad()
    with lab.recorded(bench) as rec:
        with rec.phase("offloader"):
            culprits.replace_the_local_tensors(bench.model, "npu")
        lab.look("live", bench)
        lab.fails(rec, "save", bench.model.state_dict)
        with rec.phase("remedy"):  # wrapper and local together again, then through the public route
            culprits.replace_the_local_tensors(bench.model, "cpu")
            _mend(bench)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk103a(lab: Lab) -> None:
    bench, like = build(DECODER, "unpinned"), build(DECODER, "unpinned")
    for b in (bench, like):
        b.train()
        b.optimizer.zero_grad()
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.look("live", bench)
        with rec.phase("remedy"):
            _mend(bench)
        lab.cured(rec, bench, like)


@scenario()
def dk103a_fails(lab: Lab) -> None:
    bench = build(DECODER, "unpinned")
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))


@scenario(ranks=2)
def dk103b(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    for b in (bench, like):
        b.train()
        b.optimizer.zero_grad()
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.move_one_child(bench.model, "npu")
        lab.look("live", bench)
        with rec.phase("remedy"):
            _mend(bench)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk104(lab: Lab) -> None:
    """`dcp.load` into a model on meta succeeds and loads nothing."""
    import torch.distributed.checkpoint as dcp

    source = build(DECODER, "pinned")
    dcp.save({"model": source.model.state_dict()}, checkpoint_id=str(lab.folder / "checkpoint"))
    bench = build(DECODER, "pinned", on_meta=True)
    with lab.recorded(bench) as rec:
        with rec.phase("load"):
            dcp.load({"model": bench.model.state_dict()}, checkpoint_id=str(lab.folder / "checkpoint"))
        lab.look("live", bench)
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))
    fresh = build(DECODER, "pinned", on_meta=True)
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            fresh.model.to_empty(device="cpu")
            state = fresh.model.state_dict()
            dcp.load({"model": state}, checkpoint_id=str(lab.folder / "checkpoint"))
            fresh.model.load_state_dict(state)
            fresh.model.scale.copy_(Decoder().scale)  # type: ignore[operator, union-attr]
            culprits.buffers_to_device(fresh.model, "npu")
        lab.cured(rec, fresh, source)


@scenario(ranks=2)
def dk301(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    for b in (bench, like):
        b.train()
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.look("live", bench)
        with rec.phase("remedy"):
            bench.optimizer.zero_grad(set_to_none=True)
            _mend(bench)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk301_fails(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    bench.train()
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.fails(rec, "train", bench.optimizer.step)


@scenario(ranks=2)
def dk302(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        _load_while_split(bench, like, rec)
        lab.look("live", bench)
        with rec.phase("remedy"):
            for state in bench.optimizer.state.values():
                state.update({key: value.to("cpu") for key, value in state.items()})
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk302_fails(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        _load_while_split(bench, bench, rec)
        lab.fails(rec, "train", bench.train)


def _load_while_split(bench: Bench, like: Bench, rec: Recorder) -> None:
    for b in {id(b): b for b in (bench, like)}.values():
        b.train()
        b.optimizer.zero_grad()
    saved = bench.optimizer.state_dict()
    with rec.phase("load"):
        culprits.load_model_to_device(bench.model, "npu")
        culprits.restore_optimizer(bench.optimizer, saved)
        _mend(bench)


@scenario(ranks=2, group="alone")
def dk402(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
        lab.look("live", bench)
        lab.fails(rec, "clip", lambda: culprits.clip(bench))
        with rec.phase("remedy"):  # the second remedy: stage each tensor on the mesh's device
            whole = [p.detach().to("npu").full_tensor() for p in bench.model.parameters()]
        lab.answer["cured"] = {t.device.type for t in whole} == {"npu"}


@scenario(ranks=2)
def dk402_other_group(lab: Lab) -> None:
    """The first remedy: both backends."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("train"):
        bench.train()
        culprits.clip(bench)
    lab.answer["cured"] = True
    lab.look("live", bench)


@scenario(ranks=2)
def dk501(lab: Lab) -> None:
    bench, like = build(STRAIGHT, "pinned"), build(STRAIGHT, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.offload_model_to_cpu(bench.model)
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))
        with rec.phase("remedy"):
            culprits.buffers_to_device(bench.model, "npu")
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk601(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))
        with rec.phase("mend"):
            _mend(bench)
        lab.look("live", bench)
        lab.fails(rec, "retry", lambda: culprits.forward_pass(bench))
    fresh = build(DECODER, "pinned")  # the remedy of this hazard is to build the model again
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        lab.cured(rec, fresh, like)


@scenario(ranks=2)
def dk604(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    for b in (bench, like):
        b.train()
        b.optimizer.zero_grad()

    def mistake(*_: object) -> None:
        raise ValueError("a mistake in a user's own hook")

    handle = bench.model.get_submodule("layers.0").register_full_backward_hook(mistake)
    with lab.recorded(bench) as rec:
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench).backward())
        handle.remove()
        bench.optimizer.zero_grad()
        lab.look("live", bench)
        if not hasattr(bench.model, "reset_iter_state"):  # before torch 2.13 the next forward raises
            lab.fails(rec, "train", lambda: culprits.forward_pass(bench).backward())
        else:
            with rec.phase("train"):
                culprits.forward_pass(bench).backward()
            lab.answer["gradients"] = sum(p.grad is not None for p in bench.optimizer.param_groups[0]["params"])
            with rec.phase("remedy"):
                bench.model.zero_grad()
                bench.optimizer.zero_grad()
                bench.model.reset_iter_state()
            lab.cured(rec, bench, like)
            return
    fresh = build(DECODER, "pinned")  # the remedy everywhere: build the model again
    fresh.train()
    fresh.optimizer.zero_grad()
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        lab.cured(rec, fresh, like)


@scenario(ranks=2)
def dk603(lab: Lab) -> None:
    _two_owners(lab)


@scenario(ranks=2)
def dk901(lab: Lab) -> None:
    from diagkit.lab.engines import EngineConfig, build_engine

    engine = build_engine("veomni", "#7103", EngineConfig())
    assert dk.inspect(engine).findings.codes == ()
    del engine._uses_fsdp2_cpu_offload_policy  # as in a subclass that skips the `__init__` that sets it
    lab.answer["live"] = list(dk.inspect(engine).findings.codes)
    with dk.record(engine.module, engine.optimizer, out=lab.folder, engine=engine) as rec:
        lab.fails(rec, "save", lambda: engine.save_checkpoint(lab.folder / "ckpt"))
    fresh = build_engine("veomni", "#7103", EngineConfig())
    fresh._uses_fsdp2_cpu_offload_policy = False
    lab.answer["flag false"] = list(dk.inspect(fresh).findings.codes)
    fresh._uses_fsdp2_cpu_offload_policy = True
    lab.answer["after"] = list(dk.inspect(fresh).findings.codes)
    fresh.save_checkpoint(lab.folder / "ckpt")
    lab.answer["cured"] = True


def _two_owners(lab: Lab) -> None:
    from diagkit.lab.engines import EngineConfig, build_engine

    engine = build_engine("veomni", "#7103", EngineConfig(param_offload=True, optimizer_offload=True))
    lab.answer["live"] = list(dk.inspect(engine).findings.codes)

    def train() -> None:
        with engine.train_mode():
            engine.train_batch()

    with dk.record(engine.module, engine.optimizer, out=lab.folder, engine=engine) as rec:
        lab.fails(rec, "train", train)
    engine = build_engine("veomni", "#7103", EngineConfig())
    with engine.train_mode():
        engine.train_batch()
    lab.answer["after"] = list(dk.inspect(engine).findings.codes)
    lab.answer["cured"] = True


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


def main() -> None:
    folder = Path(sys.argv[1])
    warm_up()
    started = time.monotonic()
    results = run(folder, *sys.argv[2:])
    (folder / "results.json").write_text(json.dumps(results))
    print(f"{len(results)} scenarios in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
