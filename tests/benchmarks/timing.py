"""Bare and tooled steps side by side: what a tool adds, and what the machine adds by itself.

The two alternate in one process, in swapped order every second time, so that a machine that slows down slows both.
A null run (no tool on either side) says what is left of that; its excess is subtracted where figures are compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def paired(
    step: Callable[[], None],
    around: Callable[[], AbstractContextManager[Any]],
    on: Callable[[], None],
    off: Callable[[], None],
    pairs: int,
    warm_up: int,
) -> dict[str, float]:
    """Times pairs of a bare and a tooled step.

    ``on`` and ``off`` put the tool in and take it out and are not timed; ``around`` is what a user writes around each
    step, and is. The ratio is the median of tooled over bare of each pair; ``added_us`` the median difference.
    """

    def bare_once() -> float:
        off()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    def tooled_once() -> float:
        on()
        begin = time.perf_counter()
        with around():
            step()
        return time.perf_counter() - begin

    for _ in range(warm_up):
        bare_once()
        tooled_once()
    ratios, added, bares = [], [], []
    for n in range(pairs):
        if n % 2:
            bare, tooled = bare_once(), tooled_once()
        else:
            tooled, bare = tooled_once(), bare_once()
        ratios.append(tooled / bare)
        added.append((tooled - bare) * 1e6)
        bares.append(bare * 1e6)
    off()
    low, high = interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "added_us": statistics.median(added),
        "bare_us": statistics.median(bares),
    }
