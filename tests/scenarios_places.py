"""Metadata, bytes and buffers that are not where they should be: scenarios of `diagnosis_ranks.py`."""

from __future__ import annotations

import culprits
import torch
from diagnosis_lab import Lab, mend, scenario

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, STRAIGHT, build
from diagkit.demo.predictions.models import Decoder


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
            mend(bench)
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
            mend(bench)
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
            mend(bench)
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
            mend(bench)
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


@scenario(ranks=2, alone=True)
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
