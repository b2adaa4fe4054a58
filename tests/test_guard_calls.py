"""`dk.guard` where a call of `_apply` is no plain one, on forked ranks of the simulated accelerator."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def results(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("guard_calls")
    command = [sys.executable, str(ROOT / "tests" / "guard_calls_ranks.py"), str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "results.json").read_text())
    return {name: rank.get("told", rank) for name, [rank] in found.items()}


def test_a_closed_guard_that_is_entered_again_guards_again(results: Any) -> None:
    told = results["a_closed_guard_that_is_entered_again"]
    assert told["answers"] == ["MoveBlocked", "MoveBlocked", "<Guard of FSDPDecoder, closed>"] * 2
    assert told["without its model"].startswith("UsageError: nothing to guard")


def test_a_guard_without_with_stays_in_force_when_nobody_holds_it(results: Any) -> None:
    assert results["a_guard_that_nobody_holds"] == "MoveBlocked"


def test_a_module_that_hides_the_model_from_its_children_takes_it_nowhere(results: Any) -> None:
    told = results["a_module_that_forwards_the_call_to_one_that_it_hides"]
    assert told.pop("nothing changed") is True
    assert set(told.values()) == {"MoveBlocked"} and len(told) == 4


def test_a_parameter_stays_whichever_slot_it_is_moved_through(results: Any) -> None:
    told = results["a_parameter_in_a_slot_that_fsdp_does_not_know"]
    alone, around = told["raise"]
    assert alone.startswith("MoveBlocked: a move of Linear to npu:0 goes past FSDP2") and around == "MoveBlocked"
    assert told["skip"] == ["passed", "passed"] and told["skip, the rest"] == "npu"
    for mode in ("raise", "skip"):
        assert told[f"{mode}, stopped"] == 2 and told[f"{mode}, nothing changed"]


def test_a_call_for_a_module_alone_is_judged_by_its_own_parameters(results: Any) -> None:
    told = results["a_call_for_a_module_alone"]
    assert told["raise"] == ["passed", "MoveBlocked", "npu", "cpu", 1]
    assert told["skip"] == ["passed", "passed", "npu", "cpu", 1]


def test_a_function_of_the_users_own_is_called_as_often_as_ever_and_stopped_by_what_it_does(results: Any) -> None:
    told = results["a_function_of_the_users_own"]
    assert told["called"] is True
    assert told["raise"].startswith("MoveBlocked: a move of FSDPDecoder to npu:0 splits") and told["nothing changed"]
    assert told["skip"] == [[], 1]
    assert told["stayed"] == [["cpu", "torch.float64"]], "parameters and gradients"
    assert told["went"] == ["npu", "torch.float64"]


def test_a_fault_of_the_guard_lets_a_watched_call_pass_and_is_told_once(results: Any) -> None:
    assert results["a_fault_of_the_guard_in_a_watched_call"] == [
        "passed",
        "diagkit's guard could not judge a move: LookupError: a fault of ours",
    ]


def test_of_a_move_with_a_cast_the_move_alone_is_skipped(results: Any) -> None:
    assert results["a_move_with_a_cast_is_half_skipped"] == {
        "policy": ["cpu torch.bfloat16"],
        "others": "npu torch.bfloat16",
        "buffers": [True, "torch.bfloat16"],
        "codes": [],
    }


def test_what_moves_nothing_or_is_a_strangers_reads_no_group(results: Any) -> None:
    assert results["how_often_the_models_are_looked_through"] == {
        "a layer to the CPU": 0,
        "a cast": 0,
        "a stranger": 0,
        "a layer to the device": 1,
    }
    assert results["a_strangers_parts_are_not_asked_about_one_by_one"] == ["Sequential"]
