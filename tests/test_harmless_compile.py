"""`torch.compile` makes the same of a job that is recorded: no graph breaks, no compilations, nothing of ours in it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
SETUPS = ("layers under FSDP2", "whole model under FSDP2", "whole model", "optimizer step", "move and save")
WAYS = ("phases", "transitions", "full", "attach", "auto")
Told = dict[str, dict[str, Any]]  # by set-up and way


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("compile")
    [result] = run_ranks(HERE / "harmless_compile.py", 1, args=[str(folder)], timeout=280)
    found: Told = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_compiled_job_computes_the_same_and_is_left_as_it_was(told: Told, setup: str, way: str) -> None:
    bare, found = told[setup]["bare"], told[setup][way]
    assert found["results"] == bare["results"] and len(set(bare["losses"])) == len(bare["losses"])
    assert (found["left"], found["trouble"]) == ([], [])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setup", SETUPS)
def test_what_is_recorded_from_the_start_is_compiled_as_it_is_alone(told: Told, setup: str, way: str) -> None:
    bare, found = told[setup]["bare"]["compiler"], told[setup][way]["compiler"]
    assert bare["frames"]["ok"] >= 1  # it was compiled at all
    frames, alone = found.pop("frames"), bare["frames"]
    assert frames["total"] == frames["ok"] <= alone["ok"]
    assert found == {key: value for key, value in bare.items() if key != "frames"}


# Not "move and save": a compiled function that itself moves or saves is guarded by the very functions that a recording
# patches, and so is compiled again when one begins or ends.
@pytest.mark.parametrize("setup", SETUPS[:-1])
def test_recording_what_is_compiled_already_compiles_nothing_again(told: Told, setup: str) -> None:
    turns = told[setup]["turns"]
    assert turns["recorded"] == turns["bare"]
