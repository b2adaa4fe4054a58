"""A process that is killed loses at most its last line, and its trace says in which phase it was cut off."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from ranks import run_ranks

from diagkit.trace import Trace, open_trace, read_rank

HERE = pathlib.Path(__file__).resolve().parent
RANKS = 20
NAMES = ("train", "save", "load")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[dict[str, int]]]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("killed")
    seed = time.time_ns() % 100_000
    print(f"seed {seed}")
    [result] = run_ranks(HERE / "killed_ranks.py", 1, args=[str(folder), str(seed)], timeout=200)
    return open_trace(folder), json.loads(result.stdout.splitlines()[-1])


def test_every_trace_of_a_killed_rank_opens(killed: tuple[Trace, list[dict[str, int]]]) -> None:
    trace, told = killed
    assert [one["signal"] for one in told] == [signal.SIGKILL] * RANKS
    assert len(trace) == RANKS and trace.missing_ranks == []
    assert max(one["left"] for one in told) > 5  # they had been at work
    assert len({one["begun"] for one in told}) > 5  # and were killed at different moments


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_phase_in_which_a_rank_was_cut_off_is_told(killed: tuple[Trace, list[dict[str, int]]], rank: int) -> None:
    trace, told = killed
    one, found = told[rank], trace[rank]
    last = found.last_phase
    if one["entered"] == one["begun"] > one["ending"]:
        possible = {one["begun"]}  # it was inside
    elif one["begun"] > one["entered"]:
        possible = {0, one["begun"]}  # it was about to enter
    else:
        possible = {0, one["ending"]}  # it was about to leave, or had left
    assert last.ordinal in possible, one
    assert not last.ordinal or last.name == NAMES[last.ordinal % 3]
    where = f"in phase {last.ordinal} ({last.name})" if last.ordinal else "outside any phase"
    assert f"rank {rank}: rank {rank} was cut off {where}: no closing line" in trace.problems


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_killed_rank_loses_at_most_its_last_line(killed: tuple[Trace, list[dict[str, int]]], rank: int) -> None:
    trace, told = killed
    one, found = told[rank], trace[rank]
    assert found.ended is None and found.troubles == []
    torn = [problem for problem in found.problems if "no closing line" not in problem]
    assert len(torn) <= 1 and all("the line is not finished" in problem for problem in torn)
    # Every phase that was left has both its edges and what happened between them.
    for ordinal in range(1, one["left"] + 1):
        phase = found.phases[ordinal]
        assert phase.enter is not None and phase.exit is not None
        calls = {"train": {"Optimizer.step": 1}, "save": {"Module.state_dict": 1, "Module._apply": 1}}
        expected = calls.get(phase.name, {"Module.state_dict": 1, "Module.load_state_dict": 1, "Module._apply": 1})
        assert phase.calls == expected


BLOCKED = """
import sys
sys.path[:0] = [sys.argv[1]]
from diagkit.trace.schema import ENTER, PARAMETER, Header, Row
from diagkit.trace.writer import TraceWriter
writer = TraceWriter.create(sys.argv[2], Header(run="blocked", rank=3, world_size=4))
writer.moment(ENTER, "save: enter", 1, [], key=True, begins={"name": "save", "parent": 0, "label": ""})
print("ready", flush=True)
writer.table([Row(i, PARAMETER, "model", f"layers.{i}.self_attn.q_proj.weight") for i in range(20_000)], phase=1)
"""


def test_killed_inside_a_write_it_loses_that_line_alone(tmp_path: pathlib.Path) -> None:
    """The file is a pipe that nobody empties: the process stands in the middle of a long line when it is killed."""
    pipe = tmp_path / "rank-00003.jsonl"
    os.mkfifo(pipe)
    got: list[bytes] = []
    stop = threading.Event()

    def reader() -> None:
        with pipe.open("rb", buffering=0) as file:
            stop.wait(60)
            while part := file.read(1 << 16):
                got.append(part)

    thread = threading.Thread(target=reader)
    thread.start()
    command = [sys.executable, "-c", BLOCKED, str(HERE.parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # until it sleeps in the write
            state = re.search(r"State:\s+(\w)", pathlib.Path(f"/proc/{child.pid}/status").read_text())
            if state and state[1] == "S":
                break
            time.sleep(0.02)
        child.kill()
    stop.set()
    thread.join()
    data = b"".join(got)
    assert len(data) > 60_000 and not data.endswith(b"\n")
    path = tmp_path / "drained" / "rank-00003.jsonl"
    path.parent.mkdir()
    path.write_bytes(data)
    trace = open_trace(path.parent)
    assert trace[3].problems == [
        "line 3: the line is not finished (the process ended while writing it, or is still writing); skipped",
        "rank 3 was cut off in phase 1 (save): no closing line",
    ]
    assert read_rank(data.splitlines(keepends=True)).last_phase.name == "save"
