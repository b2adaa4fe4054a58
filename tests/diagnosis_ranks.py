"""Every hazard of the catalogue, really brought about on forked ranks of the simulated accelerator, and mended.

``python diagnosis_ranks.py OUT`` runs all scenarios and writes ``OUT/results.json``; traces are in ``OUT/NAME``.
A scenario has a phase per step; "remedy" does what the rule's text says, and "after" proves that it cured.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import culprits
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit.capture import Recorder
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, Kind, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.demo.predictions.models import Decoder
from diagkit.torch_internals import torch_version

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


def _trained(policy: str = "pinned", kind: Kind = DECODER) -> Bench:
    """After one step, without gradients."""
    bench = build(kind, policy)
    bench.train()
    bench.optimizer.zero_grad()
    return bench


def _loss(bench: Bench) -> float:
    """The loss of one forward pass, after which everything is sharded again."""
    with torch.no_grad():
        loss = float(bench.loss())
    bench.model.reshard()  # type: ignore[operator]
    return loss


def _mixed() -> Bench:
    """One layer without the policy in a model under it."""
    torch.manual_seed(0)
    model = Decoder()
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    first, second = DECODER.parts(model)
    fully_shard(first.to("npu"), mesh=mesh)
    culprits.wrap(model, [second], mesh)
    return Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")


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
def dk105(lab: Lab) -> None:
    bench, like = _trained(), _trained()
    with lab.recorded(bench) as rec:
        with rec.phase("cast"):
            culprits.cast_through_data(bench.model, torch.bfloat16)
        lab.look("live", bench)
        lab.answer["forward unchanged"] = _loss(bench) == _loss(like)
        lab.answer["saved as"] = str(bench.model.state_dict()["head.weight"].dtype)
        lab.fails(rec, "train", bench.train)
    bench = _trained()  # backward was aborted (DK604): the mend is tried on a model that did not get so far
    culprits.cast_through_data(bench.model, torch.bfloat16)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            bench.model.float()
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk201(lab: Lab) -> None:
    _exchanged(lab, "pinned")


@scenario(ranks=2)
def dk201_without_policy(lab: Lab) -> None:
    _exchanged(lab, "none")


def _exchanged(lab: Lab, policy: str) -> None:
    bench, like = _trained(policy), _trained(policy)
    with lab.recorded(bench) as rec:
        before = _loss(bench)
        with rec.phase("offloader"):
            culprits.exchange_the_local_tensors(bench.model, 1.0)
        lab.look("live", bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = _loss(bench) == before
        like.train()
        lab.answer["loss should be"] = _loss(like) - before
        for b in (bench, like):
            b.optimizer.zero_grad()
        with rec.phase("remedy"):
            bench.model._apply(torch.clone)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk201_slot(lab: Lab) -> None:
    """Another parameter is put into a module's slot."""
    bench = _trained()
    head = bench.model.get_submodule("head")
    with lab.recorded(bench) as rec:
        before, mine = _loss(bench), head.weight
        with rec.phase("surgery"):
            culprits.put_into_the_slot(head, 0.0)
        lab.look("live", bench)
        lab.answer["forward unchanged"] = _loss(bench) == before
        lab.answer["put back"] = head.weight is mine


@scenario(ranks=2)
def dk201_before_the_first_forward(lab: Lab) -> None:
    """Lazy init takes exchanged tensors over: no hazard yet."""
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("offloader"):
            culprits.exchange_the_local_tensors(bench.model, 1.0)
        lab.look("live", bench)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk202(lab: Lab) -> None:
    """The optimizer is built before `fully_shard`."""
    torch.manual_seed(0)
    model = Decoder()
    bench = Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    with lab.recorded(bench) as rec:
        with rec.phase("init"):
            culprits.wrap(model, DECODER.parts(model), mesh)
        lab.look("live", bench)
        before = _loss(bench)
        with rec.phase("train"):
            bench.train()
            bench.train()
        lab.answer["loss stands still"] = _loss(bench) == before
        lab.answer["states"] = len(bench.optimizer.state)
    _anew(lab, bench, build(DECODER, "pinned"))


@scenario(ranks=2)
def dk202_assigned(lab: Lab) -> None:
    """A load by assignment puts new parameters into the modules."""
    bench = _trained()
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    with lab.recorded(bench) as rec:
        with rec.phase("load"):
            culprits.load_by_assignment(bench.model, state)
        lab.look("live", bench)
        before = _loss(bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = _loss(bench) == before


@scenario(ranks=2)
def dk202_gathered(lab: Lab) -> None:
    """The optimizer is built while the root's parameters are gathered, after an evaluation."""
    bench = build(DECODER, "pinned")
    with torch.no_grad():
        bench.loss()
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.01)
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
        lab.look("live", bench)
        lab.answer["without gradient"] = sum(p.grad is None for p in bench.optimizer.param_groups[0]["params"])


def _anew(lab: Lab, bench: Bench, like: Bench) -> None:
    """The remedy of a dead optimizer."""
    bench.model.zero_grad()
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.01)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        lab.cured(rec, bench, like)


class _Tied(Decoder):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight


TIED = replace(DECODER, make=_Tied)


@scenario(ranks=2)
def dk203(lab: Lab) -> None:
    """A checkpoint with both names, loaded by assignment."""
    bench, like = build(TIED, "pinned"), build(TIED, "pinned")
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    state["head.weight"].zero_()
    embed, head = bench.model.get_submodule("embed"), bench.model.get_submodule("head")
    with lab.recorded(bench) as rec:
        with rec.phase("load"):
            culprits.load_by_assignment(bench.model, state)
        lab.look("live", bench)
        lab.answer["apart"] = head.weight is not embed.weight
        lab.answer["loaded is lost"] = _loss(bench) == _loss(like) and head.weight is embed.weight
    fresh = build(TIED, "pinned")
    del state["head.weight"]
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("load"):
            fresh.model.load_state_dict(state, strict=False)
        lab.cured(rec, fresh, like)


@scenario(ranks=2)
def dk203_materialised(lab: Lab) -> None:
    """`to_empty` before wrapping gives each slot memory of its own."""
    with torch.device("meta"):
        model = _Tied()
    bench = Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), TIED, "npu")
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    with dk.record(model, out=lab.folder) as rec, rec.phase("init"):
        model.to_empty(device="cpu")
        model.load_state_dict(_Tied().state_dict(), strict=False)
        model.scale.copy_(Decoder().scale)
        culprits.wrap(model, DECODER.parts(model), mesh)
    bench.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bench.train()
    head, embed = (model.get_submodule(name).weight for name in ("head", "embed"))
    lab.answer["trained apart"] = not torch.equal(head.to_local(), embed.to_local())


@scenario(ranks=2)
def dk203_wrapped_apart(lab: Lab) -> None:
    """Two FSDP groups for one parameter."""
    model = _Tied()
    bench = Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), TIED, "npu")
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    with dk.record(model, out=lab.folder) as rec:
        with rec.phase("init"):
            culprits.wrap(model, [model.embed, model.head, *DECODER.parts(model)], mesh)
        lab.answer["apart"] = model.head.weight is not model.embed.weight
        if torch_version() >= (2, 13):
            lab.fails(rec, "train", lambda: culprits.forward_pass(bench))


@scenario(ranks=2)
def dk303(lab: Lab) -> None:
    _split_states(lab, "none", "cpu")


@scenario(ranks=2)
def dk303_under_the_policy(lab: Lab) -> None:
    _split_states(lab, "pinned", "npu")


def _split_states(lab: Lab, policy: str, device: str) -> None:
    bench, like = _trained(policy), _trained(policy)
    with lab.recorded(bench) as rec:
        culprits.move_the_states_underneath(bench.optimizer, device)
        lab.look("live", bench)
        lab.answer["saved"] = len(bench.optimizer.state_dict()["state"])
        bench.loss().backward()
        lab.fails(rec, "train", lambda: culprits.step(bench.optimizer))
    for b in (bench, like):
        b.optimizer.zero_grad()
    # A step that failed half-way has counted and decayed what it reached: only the states are mended.
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            for state in bench.optimizer.state.values():
                state.update({name: value.clone().to(value.device) for name, value in state.items()})
        lab.cured(rec, bench)


@scenario(ranks=2)
def dk401(lab: Lab) -> None:
    """Uneven shards: the global shape is wrong."""
    _factory(lab)


@scenario()
def dk401_one_rank(lab: Lab) -> None:
    """Nothing is uneven: the device is wrong."""
    _factory(lab)


def _factory(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    bench.optimizer = culprits.FactoryOptimizer(bench.model.parameters())
    bench.loss().backward()
    with lab.recorded(bench) as rec:
        lab.fails(rec, "train", lambda: culprits.step(bench.optimizer))
        lab.look("live", bench)
        with rec.phase("remedy"):
            bench.optimizer.state.clear()
            for parameter in bench.optimizer.param_groups[0]["params"]:
                bench.optimizer.state[parameter]["m"] = torch.zeros_like(parameter)
        lab.cured(rec, bench)


@scenario(ranks=2)
def dk701(lab: Lab) -> None:
    bench, like = _trained(), _trained()
    with lab.recorded(bench) as rec:
        with rec.phase("workers"):
            culprits.share_with_workers(bench.model)
        lab.look("live", bench)
        lab.answer["pinned"] = [p._local_tensor.is_pinned() for p in bench.model.parameters()]
        for b in (bench, like):
            b.train()
            b.optimizer.zero_grad()
        lab.answer["loss unchanged"] = _loss(bench) == _loss(like)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            bench.model._apply(torch.clone)
        lab.answer["pinned again"] = [p._local_tensor.is_pinned() for p in bench.model.parameters()]
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk701_mended_wrongly(lab: Lab) -> None:
    """The way back to the CPU pins one handle alone."""
    bench = _trained()
    with lab.recorded(bench) as rec:
        culprits.share_with_workers(bench.model)
        with rec.phase("mend"):
            _mend(bench)
        before = _loss(bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = _loss(bench) == before


@scenario(ranks=2)
def dk702(lab: Lab) -> None:
    """Two matrices of 64 x 64, so that shards are even; each rank cuts its half out of the whole."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to("npu")
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    held = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    state = {
        name: DTensor.from_local(torch.ones(64, 64, device="npu").chunk(2)[lab.rank], mesh, value.placements)
        for name, value in model.state_dict().items()
    }
    with dk.record(model, out=lab.folder) as rec:
        with rec.phase("load"):
            culprits.load_by_assignment(model, state)
        del state
        lab.answer["live"] = list(dk.inspect(model).findings.codes)
        lab.answer["held"] = torch.npu.memory_allocated() / held  # type: ignore[attr-defined]
        with rec.phase("remedy"):
            model._apply(torch.clone)
            gc.collect()
        lab.answer["cured"] = torch.npu.memory_allocated() == held  # type: ignore[attr-defined]
        lab.answer["after"] = list(dk.inspect(model).findings.codes)


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
def dk404(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        lab.fails(rec, "generate", lambda: culprits.continue_a_text(bench))
        # The root is left gathered, so that its parameters say npu by now.
        lab.answer["the second time"] = list(culprits.continue_a_text(bench).shape)
        bench.model.reshard()
        try:
            culprits.continue_a_text(bench)
        except RuntimeError as error:
            told = dk.explain(error)
            lab.answer["explained"], lab.answer["text"] = told.code, repr(told)
        lab.answer["after"] = list(dk.inspect(bench.model, bench.optimizer).findings.codes)
        with rec.phase("remedy"), torch.no_grad():
            tokens = torch.zeros(2, 6, dtype=torch.long, device=torch.accelerator.current_accelerator())
            longer = torch.cat([tokens, bench.model(tokens)[:, -1:].argmax(-1)], dim=1)
        lab.answer["cured"] = longer.shape == (2, 7)


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
def dk602(lab: Lab) -> None:
    """An evaluation between backward and step."""
    bench, like = _trained(), _trained()
    like.train()
    fresh = _loss(like)
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            culprits.evaluate_and_step(bench)
            with torch.no_grad():
                lab.answer["stale"] = float(bench.loss()) != fresh
        with rec.phase("remedy"):
            bench.model.reshard()
        lab.answer["mended"] = _loss(bench) == fresh
        for b in (bench, like):
            b.optimizer.zero_grad()
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk602_never_resharded(lab: Lab) -> None:
    """A switch for gradient accumulation that is never set back."""
    bench, like = _trained(), _trained()
    for module in (*DECODER.parts(bench.model), bench.model):
        module.set_reshard_after_backward(False)
    with lab.recorded(bench) as rec, rec.phase("train"):
        first = float(bench.loss().detach())
        bench.train()
        lab.answer["loss stands still"] = float(bench.loss().detach()) == first
    like.train()
    lab.answer["loss should be"] = _loss(like) - first


@scenario(ranks=2)
def dk602_resharded_in_time(lab: Lab) -> None:
    """The same steps, and whoever made them knows."""
    bench = _trained()
    with lab.recorded(bench) as rec:
        for mend in (bench.model.reshard, bench.model.state_dict):
            with rec.phase("train"):
                culprits.evaluate_and_step(bench)
                mend()
                with torch.no_grad():
                    bench.loss()
        with rec.phase("accumulate"):
            for last in (False, True):
                for module in (*DECODER.parts(bench.model), bench.model):
                    module.set_reshard_after_backward(last)
                bench.loss().backward()
            bench.optimizer.step()


@scenario(ranks=2)
def dk602_reads(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    tokens = torch.zeros(2, 6, dtype=torch.long, device="npu")
    try:
        culprits.call_a_child(bench.model, tokens)
    except RuntimeError as error:
        lab.answer["child"] = [str(error), dk.explain(error).code]
    with torch.no_grad():
        bench.loss()
    with lab.recorded(bench) as rec:
        lab.fails(rec, "read", lambda: culprits.read_a_parameter(bench.model))
        try:
            culprits.read_a_parameter(bench.model)
        except AttributeError as error:
            lab.answer["explained"] = dk.explain(error).code


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


@scenario(ranks=2)
def dk802a(lab: Lab) -> None:
    bench, like = _mixed(), build(DECODER, "pinned")
    options = {"full_state_dict": True, "cpu_offload": True}
    whole = get_model_state_dict(like.model, options=StateDictOptions(**options))
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            lab.answer["trains right"] = _losses(bench) == _losses(like)
        lab.look("live", bench)
        lab.fails(rec, "load", lambda: set_model_state_dict(bench.model, whole, options=broadcast))
    fresh = build(DECODER, "pinned")
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("load"):
            set_model_state_dict(fresh.model, whole, options=broadcast)
        lab.cured(rec, fresh)


@scenario(ranks=2)
def dk802b(lab: Lab) -> None:
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("adapt"):
            culprits.add_a_bias(bench.model)
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))
        try:
            bench.loss()
        except RuntimeError as error:
            lab.answer["explained"] = dk.explain(error).code
    torch.manual_seed(0)
    model = Decoder()
    culprits.add_a_bias(model)
    culprits.wrap(model, DECODER.parts(model), init_device_mesh("npu", (dist.get_world_size(),)))
    fresh = Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")
    with dk.record(model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        lab.cured(rec, fresh)


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
