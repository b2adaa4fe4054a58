"""What recording costs a training step.

A step is forward, backward, optimizer step and ``state_dict()`` of eight FSDP2 blocks, batch 32. Bare and tooled
steps alternate in one process, in swapped order every second time; a null run does the same with no tool, so that
what the machine does by itself can be subtracted. Figures: median of the paired ratios with a bootstrap interval,
and microseconds added per step.

Run: ``python tests/benchmarks/step_cost.py [--width 64] [--steps 200] [--no-offload]``
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from worlds import one_rank, stack

from diagkit.capture import hooks, start
from diagkit.capture.recorder import Recorder

BLOCKS = 8
BATCH = 32
WARM_UP = 20


def interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    with recorder.phase("train"):
        yield


def paired(
    step: Callable[[], None], tool: Callable[[], Any], on: Callable[[], None], off: Callable[[], None], steps: int
) -> dict[str, Any]:
    """Times ``steps`` pairs of a bare and a tooled step."""

    def bare_once() -> float:
        off()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    def tooled_once() -> float:
        on()
        begin = time.perf_counter()
        with tool():
            step()
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        bare_once()
        tooled_once()
    ratios, added = [], []
    for n in range(steps):
        if n % 2:
            bare, tooled = bare_once(), tooled_once()
        else:
            tooled, bare = tooled_once(), bare_once()
        ratios.append(tooled / bare)
        added.append((tooled - bare) * 1e6)
    low, high = interval(ratios)
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "added_us": statistics.median(added)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-offload", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with one_rank(), tempfile.TemporaryDirectory() as out:
        model = stack(BLOCKS * 4, args.width, offload=not args.no_offload)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(BATCH, args.width, device="npu")

        def step() -> None:
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.state_dict()

        def idle() -> None:
            pass

        results = {"null": paired(step, nothing, idle, idle, args.steps)}
        for detail in ("phases", "transitions"):
            recorder = start(model, optimizer, out=f"{out}/{detail}", detail=detail)
            if detail == "phases":
                on = off = idle
            else:

                def on(recorder: Recorder = recorder) -> None:
                    hooks.add(recorder)

                def off(recorder: Recorder = recorder) -> None:
                    hooks.remove(recorder)

            results[detail] = paired(step, lambda recorder=recorder: recorded(recorder), on, off, args.steps)
            recorder.close()
    for name, r in results.items():
        print(f"{name:12} {r['ratio']:.4f} [{r['low']:.4f}, {r['high']:.4f}]  {r['added_us']:8.1f} us a step")
    over = {name: r["ratio"] / results["null"]["ratio"] for name, r in results.items() if name != "null"}
    print(json.dumps({"width": args.width, "offload": not args.no_offload, "over_null": over, "results": results}))


if __name__ == "__main__":
    main()
