"""Signals that strike in the middle of our own code: the user's interrupt, and handlers that save a checkpoint."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from harmless_signals import Job
from strikes import Strike
from ways import left_behind, observed

#: Of the points that a job comes by, how many are struck; ``DIAGKIT_STRIKES=all`` strikes each.
SAMPLE = {"phases": 20, "transitions": 40, "full": 40}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals on this system")


def points(detail: str, folder: pathlib.Path) -> list[int]:
    """Numbers of points to strike, the same every time: others would make a failure hard to repeat."""
    for warm in range(2):  # caches are filled, so that all runs after it come by the same points
        Job().run(folder / f"warm{warm}", detail)
    with Strike(-1, signal.SIGINT) as none:
        Job().run(folder / "counted", detail)
    assert none.passed > 500 and not none.place
    every = range(none.passed)
    chosen = random.Random(detail).sample(every, SAMPLE[detail])
    return list(every) if os.environ.get("DIAGKIT_STRIKES") == "all" else chosen


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT interrupts, although a shell's job in the background begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def handler() -> Iterator[list[Job]]:
    """The job that a handler of SIGUSR1 saves is the last one in this list."""
    jobs: list[Job] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: jobs[-1].save())
    yield jobs
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("detail", SAMPLE)
def test_an_interrupt_anywhere_in_our_code_leaves_the_process_as_it_was_and_the_trace_whole(
    detail: str, tmp_path: pathlib.Path, interrupts: None
) -> None:
    before = observed()
    wrong: dict[str, list[str]] = {}
    for point in points(detail, tmp_path):
        job, folder = Job(), tmp_path / str(point)
        with Strike(point, signal.SIGINT) as strike:
            job.run(folder, detail)
        found = left_behind(before) + ([] if job.interrupted == bool(strike.place) else [f"met {job.interrupted}"])
        if any(file.stat().st_size for file in folder.glob("*.jsonl")):
            found += job.told_wrong(folder)
        elif not job.left:
            found.append("no trace")
        if found:
            wrong[f"{point} {strike.place}"] = found
    assert wrong == {}


@pytest.mark.parametrize("detail", SAMPLE)
def test_a_handler_that_saves_and_moves_the_model_may_run_anywhere_in_our_code(
    detail: str, tmp_path: pathlib.Path, handler: list[Job]
) -> None:
    before = observed()
    wrong: dict[str, list[str]] = {}
    for point in points(detail, tmp_path):
        job, folder = Job(), tmp_path / str(point)
        handler.append(job)
        with Strike(point, signal.SIGUSR1) as strike:
            job.run(folder, detail)
        found = left_behind(before) + job.told_wrong(folder) + ([] if job.saved == bool(strike.place) else ["not run"])
        if found:
            wrong[f"{point} {strike.place}"] = found
    assert wrong == {}
