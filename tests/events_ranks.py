"""Hazards that only several ranks, or events between two looks, show: really brought about on forked ranks.

``python events_ranks.py OUT [ONLY]`` writes ``OUT/results.json``; traces are in ``OUT/NAME``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import culprits
import torch
import torch.distributed as dist
from diagnosis_ranks import Lab

import diagkit as dk
from diagkit.demo.predictions.bench import DECODER, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up

Scenario = Callable[[Lab], None]
SCENARIOS: dict[str, tuple[Scenario, int, str]] = {}


def scenario(ranks: int = 1, group: str = "mixed") -> Callable[[Scenario], Scenario]:
    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, ranks, group)
        return function

    return enter


# ---- ranks that disagree


@scenario(ranks=2)
def dk801(lab: Lab) -> None:
    """One rank alone freezes a layer: it has less to reduce than the other, and their collective breaks down."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
        with rec.phase("freeze"):
            if lab.rank == 1:
                culprits.freeze(bench.model.get_submodule("head"))
        with rec.phase("train"):
            bench.train()
    lab.answer["trained on"] = True


@scenario(ranks=2)
def dk801_undone(lab: Lab) -> None:
    """The remedy: undone before the next collective."""
    bench, like = build(DECODER, "pinned"), build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("freeze"):
            if lab.rank == 1:
                culprits.freeze(bench.model.get_submodule("head"))
        seen: list[Any] = [None] * 2
        dist.all_gather_object(seen, [(n, p.requires_grad) for n, p in bench.model.named_parameters()])
        lab.answer["seen"] = [name for name, _ in set(seen[0]) ^ set(seen[1])]
        with rec.phase("remedy"):
            bench.model.requires_grad_(True)
        lab.cured(rec, bench, like)


@scenario(ranks=2)
def dk801_one_rank_moves(lab: Lab) -> None:
    """`if rank == 1: model.to(device)`: state_dict raises there, while the other goes on to the barrier."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec:
        with rec.phase("train"):
            bench.train()
            bench.optimizer.zero_grad()
        with rec.phase("move"):
            if lab.rank == 1:
                culprits.load_model_to_device(bench.model, "npu")
        try:
            bench.model.state_dict()
            lab.answer["reached the barrier"] = True
        except RuntimeError as error:
            lab.answer["reached the barrier"] = False
            lab.answer["said"] = str(error)


@scenario(ranks=2)
def dk801_only_inside_a_phase(lab: Lab) -> None:
    """Rank 0 alone stages its model for a moment: set aside."""
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("load"):
        if lab.rank == 0:
            bench.model.to("npu")
            bench.model.to("cpu")
            culprits.buffers_to_device(bench.model, "npu")


# ---- ranks on one device


@scenario(ranks=2)
def dk803(lab: Lab) -> None:
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    bench = build(DECODER, "pinned")
    with lab.recorded(bench) as rec, rec.phase("train"):
        bench.train()
    lab.answer["device"] = bench.model.get_buffer("scale").device.index


@scenario(ranks=2)
def dk803_one_visible_device_each(lab: Lab) -> None:
    """As under Ray: every rank says index 0, and each means another device."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(lab.rank)
    dk803(lab)


@scenario(ranks=2)
def dk803_set_in_time(lab: Lab) -> None:
    """Recording begins while every rank is still on device 0; the model is wrapped on its own."""
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    with dk.record({}, out=lab.folder) as rec:
        torch.npu.set_device(lab.rank)  # type: ignore[attr-defined]
        bench = build(DECODER, "pinned")
        rec.watch(bench.model, bench.optimizer)
        with rec.phase("train"):
            bench.train()


def run(folder: Path, only: str = "") -> dict[str, list[dict[str, Any] | None]]:
    """Every scenario whose name holds ``only``, each on fresh ranks."""
    results = {}
    for name, (function, ranks, group) in SCENARIOS.items():
        if only not in name:
            continue

        def work(
            rank: int, tell: Callable[[dict[str, Any]], None], function: Scenario = function, name: str = name
        ) -> None:
            lab = Lab(folder / name, rank)
            try:
                function(lab)
                dist.barrier()
            finally:
                tell(lab.answer)

        results[name] = fork_ranks(work, ranks, group=group, timeout=30)
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
