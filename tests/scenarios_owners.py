"""Memory, policies and who decides about them: scenarios of `diagnosis_ranks.py`."""

from __future__ import annotations

import gc

import culprits
import torch
import torch.distributed as dist
from diagnosis_lab import Lab, loss_of, mend, scenario, trained, two_losses
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, Bench, build
from diagkit.demo.predictions.models import Decoder


@scenario(ranks=2)
def dk603(lab: Lab) -> None:
    _two_owners(lab)


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


@scenario(ranks=2, alone=True)
def dk701(lab: Lab) -> None:
    bench, like = trained(), trained()
    with lab.recorded(bench) as rec:
        with rec.phase("workers"):
            culprits.share_with_workers(bench.model)
        lab.look("live", bench)
        lab.answer["pinned"] = [p._local_tensor.is_pinned() for p in bench.model.parameters()]
        for b in (bench, like):
            b.train()
            b.optimizer.zero_grad()
        lab.answer["loss unchanged"] = loss_of(bench) == loss_of(like)
    with dk.record(bench.model, bench.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("remedy"):
            bench.model._apply(torch.clone)
        lab.answer["pinned again"] = [p._local_tensor.is_pinned() for p in bench.model.parameters()]
        lab.cured(rec, bench, like)


@scenario(ranks=2, alone=True)
def dk701_mended_wrongly(lab: Lab) -> None:
    """The way back to the CPU pins one handle alone."""
    bench = trained()
    with lab.recorded(bench) as rec:
        culprits.share_with_workers(bench.model)
        with rec.phase("mend"):
            mend(bench)
        before = loss_of(bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = loss_of(bench) == before


@scenario(ranks=2, alone=True)
def dk701_before_the_first_forward(lab: Lab) -> None:
    """The first forward pins one handle alone."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("workers"):
            culprits.share_with_workers(bench.model)
        before = loss_of(bench)
        with rec.phase("train"):
            bench.train()
        lab.answer["loss stands still"] = loss_of(bench) == before


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


@scenario(ranks=2, alone=True)
def dk802a(lab: Lab) -> None:
    bench, like = _mixed(), build(DECODER, "pinned")
    options = {"full_state_dict": True, "cpu_offload": True}
    whole = get_model_state_dict(like.model, options=StateDictOptions(**options))
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            lab.answer["trains right"] = two_losses(bench) == two_losses(like)
        lab.look("live", bench)
        lab.fails(rec, "load", lambda: set_model_state_dict(bench.model, whole, options=broadcast))
    fresh = build(DECODER, "pinned")
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        with rec.phase("load"):
            set_model_state_dict(fresh.model, whole, options=broadcast)
        lab.cured(rec, fresh)


def _mixed() -> Bench:
    """One layer without the policy in a model under it."""
    torch.manual_seed(0)
    model = Decoder()
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    first, second = DECODER.parts(model)
    fully_shard(first.to("npu"), mesh=mesh)
    culprits.wrap(model, [second], mesh)
    return Bench(model, torch.optim.AdamW(model.parameters(), lr=0.01), DECODER, "npu")


@scenario(ranks=2, alone=True)
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
