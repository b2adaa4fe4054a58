"""Gradients and optimizer states that part from their parameters: scenarios of `diagnosis_ranks.py`."""

from __future__ import annotations

import culprits
import torch
from diagnosis_lab import Lab, mend, scenario, trained

import diagkit as dk
from diagkit.capture import Recorder
from diagkit.demo.predictions.bench import DECODER, Bench, build


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
            mend(bench)
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
        mend(bench)


@scenario(ranks=2, alone=True)
def dk303(lab: Lab) -> None:
    _split_states(lab, "none", "cpu")


@scenario(ranks=2)
def dk303_under_the_policy(lab: Lab) -> None:
    _split_states(lab, "pinned", "npu")


def _split_states(lab: Lab, policy: str, device: str) -> None:
    bench, like = trained(policy), trained(policy)
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


@scenario(ranks=2, alone=True)
def dk401(lab: Lab) -> None:
    """Uneven shards: the global shape is wrong. On one rank nothing is uneven: the device is wrong."""
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
