"""What ranks show only beside each other: that they disagree (DK801), or share a device (DK803)."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from diagkit.diagnosis import Findings, across, diagnose
from diagkit.trace import Trace, open_trace
from diagkit.trace.schema import ENTER, EXIT, Change, Header, Residency, Row
from diagkit.trace.writer import TraceWriter

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(300)
Answers = dict[str, list[dict[str, Any] | None]]


@pytest.fixture(scope="module")
def folder(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, str(HERE / "events_ranks.py"), str(place), "dk80"]
    subprocess.run(command, env=env, check=True, timeout=280)
    return place


@pytest.fixture(scope="module")
def answers(folder: pathlib.Path) -> Answers:
    found: Answers = json.loads((folder / "results.json").read_text())
    return found


def findings(folder: pathlib.Path, name: str) -> Findings:
    return diagnose(open_trace(folder / name))


def test_a_layer_frozen_on_one_rank_ends_the_job_and_is_told_with_what_differs(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert all(answer is None or "trained on" not in answer for answer in answers["dk801"])
    first = findings(folder, "dk801")[0]
    assert (first.code, first.names, first.ranks, first.phase) == ("DK801", ("head.weight",), (1,), "freeze")
    assert "beside rank 0: requires grad False, not True" in first.evidence
    assert first.lasting


def test_undone_before_the_next_collective_training_goes_on_and_the_finding_is_told_as_gone(
    folder: pathlib.Path, answers: Answers
) -> None:
    for answer in answers["dk801_undone"]:
        assert answer is not None and answer["seen"] == ["head.weight", "head.weight"]
        assert answer["cured"] is True and answer["after"] == []
    (found,) = findings(folder, "dk801_undone")
    assert found.code == "DK801" and not found.lasting


def test_a_move_on_one_rank_is_the_cause_and_the_disagreement_what_follows(
    folder: pathlib.Path, answers: Answers
) -> None:
    still, moved = answers["dk801_one_rank_moves"]
    assert still is not None and still["reached the barrier"] is True
    assert moved is not None and "Attempted to set the storage" in moved["said"]
    split, apart = findings(folder, "dk801_one_rank_moves")
    assert (split.code, apart.code, apart.follows) == ("DK101", "DK801", "DK101")
    assert split.ranks == apart.ranks == (1,) and split.names == apart.names
    assert apart.cause is not None and apart.cause.frame is not None
    assert apart.cause.frame.function == "load_model_to_device"
    assert "beside rank 0: metadata device npu, not cpu" in apart.evidence
    assert any(c.operation == "state_dict" and c.outcome == "crash" for c in apart.consequences)


def test_what_differs_only_inside_a_phase_is_set_aside(folder: pathlib.Path) -> None:
    trace = open_trace(folder / "dk801_only_inside_a_phase")
    assert any(getattr(facts, "split", False) for facts in trace[0].facts)
    assert not any(getattr(facts, "split", False) for facts in trace[1].facts)
    assert not diagnose(trace)


def test_two_ranks_on_one_device_are_told(folder: pathlib.Path, answers: Answers) -> None:
    assert [answer and answer["device"] for answer in answers["dk803"]] == [0, 0]
    (found,) = findings(folder, "dk803")
    assert (found.code, found.names, found.ranks) == ("DK803", ("npu:0",), (0, 1))
    assert "set_device" in found.remedy and "compute on one device" in found.evidence[0]


def test_index_0_on_every_rank_is_no_fault_where_each_sees_one_device_of_its_own(
    folder: pathlib.Path, answers: Answers
) -> None:
    assert [answer and answer["device"] for answer in answers["dk803_one_visible_device_each"]] == [0, 0]
    assert not findings(folder, "dk803_one_visible_device_each")


def test_a_device_that_is_set_after_recording_began_and_before_the_model_is_wrapped_is_no_fault(
    folder: pathlib.Path,
) -> None:
    assert [rank.header.device_index for rank in open_trace(folder / "dk803_set_in_time")] == [0, 0]
    assert not findings(folder, "dk803_set_in_time")


# ---- many ranks

ROWS = 200


def written(folder: pathlib.Path, rank: int, world: int, phases: int, odd: dict[int, Residency]) -> None:
    """A rank whose parameters are pinned on the CPU, less those of ``odd`` from the second phase on."""
    writer = TraceWriter.create(folder, Header(run="r", rank=rank, world_size=world, device="npu", host="h"))
    writer.table([Row(i, "parameter", "model", f"l.{i}.w", shape=(4,)) for i in range(ROWS)])
    usual = Residency("cpu", "cpu", pinned=True, wrapper="DTensor", mesh_device="npu", aliased=True)
    for number in range(1, phases + 1):
        changes = [Change(0, ROWS, writer.fact_id(usual))] if number == 1 else []
        if number == 2:
            changes = [Change(row, 1, writer.fact_id(facts)) for row, facts in sorted(odd.items())]
        begins = {"name": "train", "parent": 0, "label": ""}
        writer.moment(ENTER, "train: enter", number, changes, key=number == 1, begins=begins)
        writer.moment(EXIT, "train: exit", number, [])
    writer.close()


def world_of(tmp_path: pathlib.Path, odd: dict[int, dict[int, Residency]], ranks: int = 24) -> Trace:
    for rank in range(ranks):
        written(tmp_path, rank, ranks, 10, odd.get(rank, {}))
    return open_trace(tmp_path)


HALVED = Residency("cpu", "cpu", dtype="float16", pinned=True, wrapper="DTensor", mesh_device="npu", aliased=True)
EMPTY = Residency("cpu", "cpu", pinned=False, wrapper="DTensor", mesh_device="npu", aliased=False, empty=True)
ELSEWHERE = Residency("npu:5", "npu:5", dtype="", wrapper="DTensor", mesh_device="npu", aliased=True)


def test_the_few_are_told_beside_the_many(tmp_path: pathlib.Path) -> None:
    found = [f for f in diagnose(world_of(tmp_path, {7: {3: HALVED}, 9: {3: HALVED}})) if f.code == "DK801"]
    assert [(f.names, f.ranks) for f in found] == [(("l.3.w",), (7, 9))]


def test_empty_shards_and_other_indices_of_a_device_are_set_aside(tmp_path: pathlib.Path) -> None:
    same = {rank: {5: Residency(f"npu:{rank}", f"npu:{rank}", wrapper="DTensor", aliased=True)} for rank in range(24)}
    assert not across_codes(world_of(tmp_path, {**same, 4: {**same[4], 8: EMPTY}}))


def test_equal_ranks_are_compared_once_and_states_only_where_one_changed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = world_of(tmp_path, {rank: {3: HALVED, 4: ELSEWHERE} for rank in range(5)})
    compared: list[int] = []
    apart = across._apart

    def counted(mine: list[int], theirs: list[int], rows: int) -> dict[int, tuple[int, int]]:
        compared.append(rows)
        return apart(mine, theirs, rows)

    monkeypatch.setattr(across, "_apart", counted)
    assert [f.ranks for f in diagnose(trace) if f.code == "DK801"] == [(0, 1, 2, 3, 4)]
    assert compared == [ROWS]  # of 5 ranks that differ from 19, at 10 ends of phases and one of the trace


def across_codes(trace: Trace) -> list[str]:
    return [f.code for f in diagnose(trace) if f.code.startswith("DK80")]
