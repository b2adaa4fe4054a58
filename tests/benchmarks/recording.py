"""What recording costs as models grow and as a job goes on.

Two questions, each a panel of the figure, on one rank of the simulated accelerator with CPUOffloadPolicy:

- What does a look at everything (parameters, gradients, optimizer states, FSDP groups) cost against parameters: the
  two edges of a phase in which nothing changed, and a mark, which reads all of it afresh and tells it.
- Does a recorded training step cost more the more steps were recorded: recorded and bare steps in turn, and what the
  recorded ones took longer and added to the trace, by the number of steps done.

``bench.py`` runs it; by hand: ``python tests/benchmarks/recording.py [--quick] DIR`` draws the figure there and prints
its figures as JSON last.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import paired
from worlds import one_rank, trained

from diagkit.capture import hooks, start

SIZES = (96, 500, 1000, 2000, 4000, 8000)
ROUNDS = 15
BLOCKS, WIDTH = 24, 64
STEPS, BIN = 1500, 100


def timed(call: Callable[[], None]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def by_parameters(sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    """Milliseconds of a phase's two edges and of a mark, for each size of model."""
    points = []
    for size in sizes:
        model, optimizer, _ = trained(size, 8)
        with tempfile.TemporaryDirectory() as out:
            recorder = start(model, optimizer, out=out)

            def edges(recorder: Any = recorder) -> None:
                with recorder.phase("train"):
                    pass

            def mark(recorder: Any = recorder) -> None:
                recorder.mark("look")

            # Not in turn: what is read after a mark is read row by row once.
            edge, whole = (statistics.median([timed(call) for _ in range(rounds)][2:]) for call in (edges, mark))
            recorder.close()
        points.append({"parameters": size, "edges_ms": edge, "mark_ms": whole})
        print(json.dumps(points[-1]), flush=True)
    return points


def by_steps(steps: int, size: int) -> list[dict[str, float]]:
    """What recorded steps took longer than bare ones beside them (milliseconds) and added to the trace (bytes a step),
    by the number of steps recorded before."""
    model, optimizer, step = trained(4 * BLOCKS, WIDTH)
    points = []
    with tempfile.TemporaryDirectory() as out:
        recorder = start(model, optimizer, out=out)

        for done in range(size, steps + 1, size):
            before = recorder.path.stat().st_size if recorder.path else 0
            found = paired(
                step,
                lambda: recorder.phase("train"),
                lambda: hooks.add(recorder),
                lambda: hooks.remove(recorder),
                pairs=size,
                warm_up=5 if done == size else 0,
            )
            grown = (recorder.path.stat().st_size if recorder.path else 0) - before
            points.append({"steps": done, "added_ms": found["added_us"] / 1e3, "bytes": grown / size})
            print(json.dumps(points[-1]), flush=True)
        recorder.close()
    return points


def slope(points: list[dict[str, float]], x: str, y: str) -> float:
    """Of the line of least squares."""
    return statistics.linear_regression([p[x] for p in points], [p[y] for p in points]).slope


def draw(found: dict[str, list[dict[str, float]]], path: pathlib.Path) -> None:
    """The two panels; the title of each says how the cost grows."""
    from matplotlib.figure import Figure

    from diagkit.views import palette

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes, steps = found["by_parameters"], found["by_steps"]
    lines = (("edges_ms", "a phase: both edges", palette.GOOD, "o"), ("mark_ms", "a mark", palette.BAD, "s"))
    for key, label, colour, mark in lines:
        left.plot([p["parameters"] for p in sizes], [p[key] for p in sizes], marker=mark, color=colour, label=label)
    each = " and ".join(f"{slope(sizes, 'parameters', key) * 1e3:.1f}" for key, *_ in lines)
    left.set(xlabel="parameters", ylabel="milliseconds", title=f"{each} µs per parameter", ylim=(0, None))
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.legend(frameon=False)
    added = [p["added_ms"] for p in steps]
    right.plot([p["steps"] for p in steps], added, marker="o", color=palette.GOOD)
    sizes_told = statistics.median(p["bytes"] for p in steps)
    right.set(
        xlabel="steps recorded before",
        ylabel="milliseconds added to a step",
        title=f"{4 * BLOCKS} parameters: {statistics.median(added):.1f} ms and {sizes_told:,.0f} bytes a step",
        ylim=(0, 2 * max(added)),
    )
    right.xaxis.set_major_formatter("{x:,.0f}")
    for panel in (left, right):
        panel.locator_params(axis="x", nbins=5)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=pathlib.Path, help="recording.png goes there")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps, to see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with one_rank():
        found = {
            "by_parameters": by_parameters(SIZES[:2] if args.quick else SIZES, 5 if args.quick else ROUNDS),
            "by_steps": by_steps(20 if args.quick else STEPS, 10 if args.quick else BIN),
        }
    args.folder.mkdir(parents=True, exist_ok=True)
    draw(found, args.folder / "recording.png")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
