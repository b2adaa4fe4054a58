"""Children of a recorded job, forked and spawned, write nothing into its trace, say nothing and do not hang."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any, NamedTuple

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
WAYS = ("phases", "transitions", "full", "attach", "auto")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork on this system")


class Run(NamedTuple):
    told: dict[str, dict[str, Any]]  # by way
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("processes")
    [result] = run_ranks(HERE / "harmless_processes.py", 1, args=[str(folder)], timeout=280)
    [line] = result.stdout.splitlines()  # no child has gone on to where its parent prints
    told = json.loads(line)
    if set(told) == {"bare"}:
        pytest.skip("on this torch a forked child of a job hangs without diagkit, too")
    return Run(told, result.stderr)


@pytest.mark.parametrize("way", WAYS)
def test_forked_children_end_as_they_do_alone_and_so_does_the_parent(run: Run, way: str) -> None:
    bare, found = run.told["bare"], run.told[way]
    assert bare["codes"] == [3, 1, 5]
    assert (found["codes"], found["results"], found["left"]) == (bare["codes"], bare["results"], [])


@pytest.mark.parametrize("way", WAYS)
def test_what_a_child_does_to_its_copy_is_not_in_the_parents_trace(run: Run, way: str) -> None:
    assert run.told[way]["traces"] == [
        {"pids": 1, "own": True, "problems": [], "troubles": [], "ended": "closed", "dtypes": ["float32"]}
    ]


def test_spawned_workers_know_nothing_of_a_recording(run: Run) -> None:
    bare, found = run.told["spawn bare"], run.told["spawn full"]
    assert found["results"] == bare["results"] and found["left"] == []
    assert [trace["own"] for trace in found["traces"]] == [True]


def test_no_child_reports(run: Run) -> None:
    assert "the child's own" in run.said
    assert [line for line in run.said.splitlines() if line.startswith("diagkit")] == []
