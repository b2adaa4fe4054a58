"""Eight ranks recorded by environment variables alone: one killed, one hung at a barrier, one left out."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from diagkit.diagnosis import diagnose
from diagkit.trace import Trace, open_trace

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOB = ROOT / "tests" / "jobs" / "eight.py"


@pytest.fixture(scope="module")
def trace(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("eight")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(JOB.parent)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DIAGKIT_TRACE": str(folder / "runs"),
        "DIAGKIT_RANKS": "0-6",
        "DIAGKIT_QUIET": "2",
        "DIAGKIT_ENGINES": "__main__:Trainer",
    }
    log = folder / "stderr"
    with log.open("w") as errors:
        job = subprocess.Popen(
            [sys.executable, str(JOB), str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        # Older Gloo says a word of its own on standard output.
        ends = next((line for line in job.stdout if line.startswith("[(")), "")
        assert ends == "[(0, 0), (1, 0), (2, 0), (3, -9), (6, 0), (7, 0)]\n", log.read_text()[-3000:]
        deadline = time.monotonic() + 30
        while open_trace(folder / "runs")[5].standstill is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.wait(timeout=30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # its ranks, too
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    return open_trace(folder / "runs")


def test_the_merged_trace_says_which_rank_was_killed_which_hung_and_where_and_which_was_left_out(trace: Trace) -> None:
    left_out, killed, hung = trace.problems
    line = next(n for n, text in enumerate(JOB.read_text().splitlines(), 1) if "dist.barrier(self.pair)" in text)
    assert left_out == "left out, because only ranks 0-6 were to be recorded: 7"
    assert killed == "rank 3: rank 3 was cut off in phase 2 (save): no closing line"
    assert re.fullmatch(
        r"rank 5: rank 5 was cut off in phase 2 \(save\): no closing line; it had stood still for [2-9](\.\d)? s "
        rf"at eight.py:{line} Trainer.save: Trainer.save -> barrier",
        hung,
    )
    assert trace.missing_ranks == []
    assert sorted(trace.ranks) == [0, 1, 2, 3, 4, 5, 6]


def test_every_other_rank_has_the_whole_story(trace: Trace) -> None:
    for rank in trace:
        assert [(p.name, p.label) for p in rank.phases.values() if p.ordinal] == [
            ("train", "Trainer.train_batch"),
            ("save", "Trainer.save"),
        ]
        assert rank.troubles == []
        assert (rank.ended == "closed") == (rank.rank not in (3, 5))
        assert rank.header.run == trace.header.run
    assert diagnose(trace) == []


def test_each_model_bears_the_name_of_the_engine_that_made_it(trace: Trace) -> None:
    assert {row.model for row in trace[0].rows} == {"Trainer"}
