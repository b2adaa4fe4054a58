"""A machine runs out of device memory, disk, descriptors or memory while a job is recorded: the job never knows."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
CASES = ("device_memory", "disk", "descriptors", "no_descriptor_to_begin", "memory")
DETAILS = ("phases", "transitions", "full")
Told = dict[str, dict[str, dict[str, Any]]]  # by case and way

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")


@pytest.fixture(scope="module")
def told(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("limits")
    [result] = run_ranks(HERE / "harmless_limits.py", 1, args=[str(folder)], timeout=280)
    found: Told = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("case", CASES)
def test_the_job_meets_what_it_meets_alone_and_is_left_as_it_was(told: Told, case: str, detail: str) -> None:
    bare, found = told[case]["bare"], told[case][detail]
    assert found["results"] == bare["results"]
    before, after = found["belongings"]
    assert (found["left"], after) == ([], before)


def test_the_limits_are_real(told: Told) -> None:
    assert told["device_memory"]["bare"]["results"][0] == "OutOfMemoryError"
    assert told["memory"]["bare"]["results"][0] == "MemoryError"


@pytest.mark.parametrize("detail", DETAILS)
def test_no_device_memory_is_the_jobs_own_failure_and_told_once(told: Told, detail: str) -> None:
    found = told["device_memory"][detail]
    assert found["warned"] == [] and found["trace"]["failures"] == ["OutOfMemoryError"]
    assert (found["trace"]["problems"], found["trace"]["troubles"]) == ([], [])


@pytest.mark.parametrize("detail", DETAILS)
def test_a_full_disk_is_one_warning_and_the_trace_goes_on_where_there_is_room_again(told: Told, detail: str) -> None:
    found = told["disk"][detail]
    [warning], trace = found["warned"], found["trace"]
    assert "File too large" in warning and "the job goes on" in warning
    [trouble] = trace["troubles"]
    assert "could not be written (File too large)" in trouble
    assert trace["phases"][-1] == "room again" and trace["ended"] == "closed"


@pytest.mark.parametrize("detail", DETAILS)
def test_a_recording_needs_no_descriptor_once_it_has_begun(told: Told, detail: str) -> None:
    found = told["descriptors"][detail]
    assert found["warned"] == []
    assert found["trace"] == {
        "problems": [], "troubles": [], "ended": "closed", "phases": ["train", "fail"], "failures": ["RuntimeError"],
    }  # fmt: skip


@pytest.mark.parametrize("detail", DETAILS)
def test_without_a_descriptor_to_begin_with_nothing_is_recorded_and_one_warning_says_so(
    told: Told, detail: str
) -> None:
    found = told["no_descriptor_to_begin"][detail]
    [warning] = found["warned"]
    assert "records nothing" in warning and "Too many open files" in warning and found["trace"] is None


@pytest.mark.parametrize("detail", DETAILS)
def test_a_look_that_finds_no_memory_is_told_and_recording_goes_on(told: Told, detail: str) -> None:
    found = told["memory"][detail]["trace"]
    assert found["troubles"] != [] and all("MemoryError" in trouble for trouble in found["troubles"])
    assert (found["problems"], found["phases"], found["ended"]) == ([], ["train"], "closed")
