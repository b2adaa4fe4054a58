"""What FSDP2 believes of itself: first forward, backward, what is gathered: scenarios of `diagnosis_ranks.py`."""

from __future__ import annotations

import culprits
import torch
from diagnosis_lab import Lab, loss_of, mend, scenario, trained

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, build
from diagkit.torch_internals import torch_version


@scenario(ranks=2)
def dk601(lab: Lab) -> None:
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("move"):
            culprits.load_model_to_device(bench.model, "npu")
        lab.fails(rec, "train", lambda: culprits.forward_pass(bench))
        with rec.phase("mend"):
            mend(bench)
        lab.look("live", bench)
        lab.fails(rec, "retry", lambda: culprits.forward_pass(bench))
    fresh = build(DECODER, "pinned")  # the remedy of this hazard is to build the model again
    with dk.record(fresh.model, fresh.optimizer, out=lab.folder / "remedy") as rec:
        lab.cured(rec, fresh, like)


@scenario(ranks=2, alone=True)
def dk602(lab: Lab) -> None:
    """An evaluation between backward and step."""
    bench, like = trained(), trained()
    like.train()
    fresh = loss_of(like)
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            culprits.evaluate_and_step(bench)
            with torch.no_grad():
                lab.answer["stale"] = float(bench.loss()) != fresh
        with rec.phase("remedy"):
            bench.model.reshard()
        lab.answer["mended"] = loss_of(bench) == fresh
        for b in (bench, like):
            b.optimizer.zero_grad()
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk602_never_resharded(lab: Lab) -> None:
    """A switch for gradient accumulation that is never set back."""
    bench, like = trained(), trained()
    for module in (*DECODER.parts(bench.model), bench.model):
        module.set_reshard_after_backward(False)
    with lab.recorded(bench) as rec, rec.phase("train"):
        first = float(bench.loss().detach())
        bench.train()
        lab.answer["loss stands still"] = float(bench.loss().detach()) == first
    like.train()
    lab.answer["loss should be"] = loss_of(like) - first


@scenario(ranks=2)
def dk602_resharded_in_time(lab: Lab) -> None:
    """The same steps, and whoever made them knows."""
    bench = trained()
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
        if torch_version() < (2, 11):  # the next forward raises
            lab.fails(rec, "train", lambda: culprits.forward_pass(bench).backward())
        else:
            with rec.phase("train"):
                culprits.forward_pass(bench).backward()
            lab.answer["gradients"] = sum(p.grad is not None for p in bench.optimizer.param_groups[0]["params"])
        if hasattr(bench.model, "reset_iter_state"):
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
