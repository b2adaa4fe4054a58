"""Parameters that are trained apart from what is gathered, or not at all: scenarios of `diagnosis_ranks.py`."""

from __future__ import annotations

from dataclasses import replace

import culprits
import torch
import torch.distributed as dist
from diagnosis_lab import Lab, loss_of, scenario, trained
from torch.distributed.device_mesh import init_device_mesh

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, Bench, build
from diagkit.demo.predictions.models import Decoder
from diagkit.torch_internals import torch_version


@scenario(ranks=2, alone=True)
def dk105(lab: Lab) -> None:
    bench, like = trained(), trained()
    with lab.recorded(bench) as rec:
        with rec.phase("cast"):
            culprits.cast_through_data(bench.model, torch.bfloat16)
        lab.look("live", bench)
        lab.answer["forward unchanged"] = loss_of(bench) == loss_of(like)
        lab.answer["saved as"] = str(bench.model.state_dict()["head.weight"].dtype)
        lab.fails(rec, "train", bench.train)
    bench = trained()  # backward was aborted (DK604): the mend is tried on a model that did not get so far
    culprits.cast_through_data(bench.model, torch.bfloat16)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            bench.model.float()
        lab.cured(rec, bench, like)


@scenario(ranks=2, alone=True)
def dk201(lab: Lab) -> None:
    _exchanged(lab, "pinned")


@scenario(ranks=2, alone=True)
def dk201_without_policy(lab: Lab) -> None:
    _exchanged(lab, "none")


def _exchanged(lab: Lab, policy: str) -> None:
    bench, like = trained(policy), trained(policy)
    with lab.recorded(bench) as rec:
        before = loss_of(bench)
        with rec.phase("offloader"):
            culprits.exchange_the_local_tensors(bench.model, 1.0)
        lab.look("live", bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = loss_of(bench) == before
        like.train()
        lab.answer["loss should be"] = loss_of(like) - before
        for b in (bench, like):
            b.optimizer.zero_grad()
        with rec.phase("remedy"):
            bench.model._apply(torch.clone)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk201_slot(lab: Lab) -> None:
    """Another parameter is put into a module's slot."""
    bench = trained()
    head = bench.model.get_submodule("head")
    with lab.recorded(bench) as rec:
        before, mine = loss_of(bench), head.weight
        with rec.phase("surgery"):
            culprits.put_into_the_slot(head, 0.0)
        lab.look("live", bench)
        lab.answer["forward unchanged"] = loss_of(bench) == before
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


@scenario(ranks=2, alone=True)
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
        before = loss_of(bench)
        with rec.phase("train"):
            bench.train()
            bench.train()
        lab.answer["loss stands still"] = loss_of(bench) == before
        lab.answer["states"] = len(bench.optimizer.state)
    _anew(lab, bench, build(DECODER, "pinned"))


@scenario(ranks=2, alone=True)
def dk202_assigned(lab: Lab) -> None:
    """A load by assignment puts new parameters into the modules."""
    bench = trained()
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    with lab.recorded(bench) as rec:
        with rec.phase("load"):
            culprits.load_by_assignment(bench.model, state)
        lab.look("live", bench)
        before = loss_of(bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = loss_of(bench) == before


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


@scenario(ranks=2, alone=True)
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
        lab.answer["loaded is lost"] = loss_of(bench) == loss_of(like) and head.weight is embed.weight
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
