"""What people type at ``diagkit demo`` and what they get: requests that make no sense, the short form, slow cells."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagkit.demo import command
from diagkit.demo.expected import Expectation, expected
from diagkit.demo.experiments import ENGINES, REVISIONS, Experiment, group_names, matrix
from diagkit.demo.launch import Launcher
from diagkit.errors import EngineError
from diagkit.torch_internals import torch_version

OLD = torch_version() < (2, 9)

NONSENSE = [
    (["--engine", "vomni"], "unknown engine: found vomni. Choose one of fsdp veomni."),
    (["--revision", "#1"], "unknown revision: found #1. Choose one of before #6463 #6604 #7005 #7103 current."),
    (["--device", "tpu"], "unknown device: found tpu. Choose one of auto sim npu cuda."),
    (["--group", "mpi"], "unknown process group: found mpi. Choose one of cpu:gloo,npu:hccl hccl"),
    (["--operation", "fly"], "unknown operation: found fly. Choose one of save load export train move."),
    (["--ranks", "0"], "--ranks makes no sense: found 0, expected a whole number from 1 to 8"),
    (["--ranks", "two"], "--ranks makes no sense: found two, expected a whole number from 1 to 8"),
    (["--timeout", "-1"], "--timeout makes no sense: found -1"),
]


def demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diagkit", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **variables})


@pytest.mark.parametrize(("arguments", "line"), NONSENSE)
def test_a_request_that_makes_no_sense_gets_one_line_with_the_remedy(arguments: list[str], line: str) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


def test_a_folder_that_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no folder")
    done = demo("--out", str(occupied / "below"))
    assert done.returncode == 2
    assert "cannot write to the folder of --out" in done.stderr and "Name another folder" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_real_device_that_is_not_there_gets_one_line_that_offers_the_simulation() -> None:
    done = demo("--device", "npu", "--short")
    if done.returncode == 0:
        pytest.skip("accelerator: there is a real one here")
    assert done.returncode == 2
    assert "not enough npu devices: found 0, expected 2, one a rank" in done.stderr
    assert "--device sim" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(OLD, reason="torch version: before 2.9 the split is silent, and nothing crashes")
@pytest.mark.smoke
def test_the_short_form_shows_the_crash_with_its_table_and_the_save_that_works(compiler: str, tmp_path: Path) -> None:
    done = demo("--short", "--device", "sim", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    crash, works = done.stdout.split("FSDP engine, #6604")
    assert 'Attempted to set the storage of a tensor on device "cpu"' in crash
    assert "before the move   after the move             at failure" in crash
    assert crash.count("npu:0 / cpu pinned  SPLIT") == 10
    assert "load_model_to_device -> Module.to -> FSDPParam.reset_sharded_param" in crash
    assert "SPLIT" not in works and "save_checkpoint() works" in works
    assert "SIMULATED" in done.stdout
    assert (tmp_path / "cells").is_dir()


def test_a_cell_that_takes_too_long_is_ended_told_and_stops_nothing(compiler: str, tmp_path: Path) -> None:
    with Launcher(tmp_path, 2, "sim", timeout=0.02) as launcher:
        late = launcher.run_one(Experiment("fsdp", "current", "save"))
        launcher.timeout = 60
        next_one = launcher.run_one(Experiment("veomni", "current", "save"))
    assert late.outcome == "no answer"
    assert late.message == "no answer within 0.02 s"
    assert late.differences()
    for pid in late.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert next_one.outcome == "ok"


def test_one_rank_hides_the_collective_that_needs_a_cpu_backend_and_the_table_knows(
    compiler: str, tmp_path: Path
) -> None:
    with Launcher(tmp_path, 1, "sim") as launcher:
        result = launcher.run_one(Experiment("fsdp", "current", "train", group="hccl"))
    assert result.expectation.failure == "no-cpu-backend"
    assert result.outcome == ("ok" if torch_version() >= (2, 10) else "crash") and result.differences() == []


def test_an_outcome_that_is_not_as_expected_is_named_and_the_exit_code_is_1(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(cell: Experiment) -> Expectation:
        return replace(expected(cell), failure=None)

    monkeypatch.setattr("diagkit.demo.launch.expected", wrong)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.main(parser.parse_args(["--short", "--device", "sim", "--out", str(tmp_path)])) == 1
    told = capsys.readouterr().out
    assert "NOT as expected:" in told
    assert "fsdp before save, cpu:gloo,npu:hccl: expected ok, found crash: Attempted to set the storage" in told
    assert "fsdp #6604" not in told.split("NOT as expected:")[1]


def test_a_split_is_silent_on_torch_2_8_and_the_table_knows(compiler: str, tmp_path: Path) -> None:
    with Launcher(tmp_path, 1, "sim") as launcher:
        result = launcher.run_one(Experiment("veomni", "before", "save"))
    assert result.differences() == []
    on_2_8 = replace(result, torch=(2, 8)).differences()
    assert on_2_8 and on_2_8[0].startswith("expected ok, found crash")


def test_a_warm_process_that_cannot_start_gives_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not enough npu devices"), Launcher(tmp_path, 8, "npu"):
        pass


def test_names_in_the_command_are_those_of_the_engines() -> None:
    from diagkit.lab import engines

    assert tuple(engines.ENGINES) == ENGINES
    assert engines.REVISIONS == REVISIONS


def test_process_groups_are_named_after_the_device() -> None:
    assert group_names("npu") == ("cpu:gloo,npu:hccl", "hccl")
    assert group_names("cuda") == ("cpu:gloo,cuda:nccl", "nccl")


def test_the_matrix_has_every_operation_once_for_each_engine_revision_and_group() -> None:
    cells = matrix(control=True)
    assert len(cells) == len(set(cells)) == 2 * 2 * (10 + 6)
    assert len({cell.slug for cell in cells}) == len(cells)
