"""Every function of the recorder fails in turn, and the job never notices; its trace, or one warning, tells of it.

`harmless_faults.py` finds the functions by itself, so that a new one is tested without being named here. The job is
run once a function, so they are divided into shares, each in a process of its own.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
Report = dict[str, dict[str, Any]]
SHARES = 6

#: Functions whose failing costs nothing that could be told, with the reason.
QUIET = {
    "diagkit.capture.entries.Handed.tensor": "only a local shape is missing",
    "diagkit.torch_internals.promised_local_shape": "a shape that cannot be told is none that disagrees",
    "diagkit.trace.sinks.FileSink.sync": "the lines are with the kernel all the same",
    "diagkit.trace.sinks.FileSink.close": "nothing is written any more",
}
#: Where these fail, patches stay in (asleep): there is nobody else to take them out.
STAYS = {"diagkit.capture.hooks.remove", "diagkit.capture.hooks.uninstall", "diagkit.capture.hooks.Patch.take_out"}
#: Where these fail, a whole look or line is lost; where others fail, the move of the model is still told.
MOVE_IS_TOLD = ("diagkit.capture.cause.", "diagkit.capture.facts.", "diagkit.capture.process.")


@dataclass(frozen=True)
class Share:
    """Names of all functions that the job calls, and what became of it where one of this share failed."""

    number: int
    used: list[str]
    told: Report


@pytest.fixture(scope="module", params=range(SHARES))
def share(request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Share:
    folder = tmp_path_factory.mktemp("faults")
    args = [str(folder), str(request.param), str(SHARES)]
    [result] = run_ranks(HERE / "harmless_faults.py", 1, args=args, timeout=290)
    return Share(request.param, **json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture
def report(share: Share) -> Report:
    return share.told


def test_without_a_fault_the_trace_is_whole_and_tells_the_move(report: Report) -> None:
    whole = report["nothing"]
    assert whole["same"] and whole["moved"]
    assert (whole["troubles"], whole["problems"], whole["warned"], whole["left"]) == ([], [], [], [])


def test_most_of_the_recorder_is_made_to_fail(share: Share) -> None:
    assert len(share.used) > 120
    assert [name for name in share.used[share.number :: SHARES] if not share.told[name]["calls"]] == []
    for name in (
        "hooks._begin", "hooks.install", "recorder.Recorder.after", "recorder.Recorder.before",
        "recorder.Recorder.failed", "recorder.Recorder.registered", "inventory.Inventory.scan", "cause.from_stack",
    ):  # fmt: skip
        assert f"diagkit.capture.{name}" in share.used


def test_no_fault_reaches_the_job(report: Report) -> None:
    assert {name: told["reached"] for name, told in report.items() if "reached" in told} == {}


def test_the_job_computes_the_same_whatever_fails(report: Report) -> None:
    assert [name for name, told in report.items() if not told.get("same")] == []


def test_every_fault_is_told(report: Report) -> None:
    called = {name: told for name, told in report.items() if told["calls"]}
    silent = [name for name, told in called.items() if not told.get("troubles") and not told["warned"]]
    assert sorted(silent) == sorted(set(QUIET) & set(report))


def test_a_fault_is_warned_of_at_most_once(report: Report) -> None:
    assert {name: told["warned"] for name, told in report.items() if len(told["warned"]) > 1} == {}


def test_the_patches_come_out_whatever_fails(report: Report) -> None:
    assert {name for name, told in report.items() if told["left"]} <= STAYS


def test_who_moved_it_may_be_lost_that_it_moved_is_not(share: Share) -> None:
    assert len([name for name in share.used if name.startswith(MOVE_IS_TOLD)]) > 20
    names = [name for name in share.told if name.startswith(MOVE_IS_TOLD)]
    assert [name for name in names if not share.told[name]["moved"]] == []
