"""`dk.guard` on forked ranks of the simulated accelerator: what it stops, what it lets pass, and how it leaves."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import culprits
import guard_ranks
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def line(function: Callable[..., Any]) -> str:
    """Where a function's first statement stands, as diagkit names it."""
    return f"culprits.py:{inspect.getsourcelines(function)[1] + 1} {function.__name__}"


LOADS, MOVES_CHILD = line(culprits.load_model_to_device), line(culprits.move_one_child)


@pytest.fixture(scope="module")
def results(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("guard")
    command = [sys.executable, str(ROOT / "tests" / "guard_ranks.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=_environment())
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "results.json").read_text())
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def answers(results: dict[str, list[dict[str, Any]]], story: str) -> list[Any]:
    """What each rank answered."""
    assert all(rank and "error" not in rank for rank in results[story]), results[story]
    return [rank["told"] for rank in results[story]]


@pytest.mark.parametrize("policy", ["pinned", "unpinned"])
@pytest.mark.parametrize("move", guard_ranks.MOVES)
def test_every_way_to_move_is_stopped_before_anything_moves(move: str, policy: str, results: Any) -> None:
    for told in answers(results, "every_way_to_move_is_stopped"):
        assert told[f"{policy}: {move}"].startswith("MoveBlocked: a move of ")
        assert told[f"{policy}: nothing changed"] is True


def test_the_error_says_what_which_line_what_would_happen_and_what_to_do(results: Any) -> None:
    [told] = answers(results, "the_message")
    assert told["whole"] == (
        "MoveBlocked: a move of FSDPDecoder to npu:0 splits its parameters: metadata npu:0, bytes in pinned CPU memory,"
        " and the next state_dict(), first forward or backward raises (DK101): found Module.to over 14 parameters under"
        f" CPUOffloadPolicy, expected parameters that stay on the CPU (at {LOADS}). Leave"
        " the module where it is: FSDP2 brings each layer to the accelerator by itself. Move inputs and buffers alone;"
        " copy a single tensor with p.to('npu')."
    )
    assert "a move of Mlp to npu:0 goes past FSDP2" in told["child"] and "(DK103b)" in told["child"]
    assert f"(at {MOVES_CHILD})" in told["child"]
    assert told["early"].endswith("which moves it there and back, enter the guard after it.")
    assert told["unpinned"].count("wholly on npu:0") == 1 and "(DK103a)" in told["unpinned"]


def test_a_guard_tells_what_it_stopped(results: Any) -> None:
    [told] = answers(results, "the_message")
    assert told["repr"].splitlines() == [
        "<Guard of list, on_move='raise'>",
        f"  {LOADS}: Module.to npu:0 ×2",
        f"  {MOVES_CHILD}: Module.to npu:0",
    ]
    assert told["closed"].startswith("<Guard of list, closed>")


def test_what_does_no_harm_passes_and_leaves_the_model_healthy(results: Any) -> None:
    assert answers(results, "what_does_no_harm_passes") == [[]]


def test_skipping_leaves_parameters_and_buffers_and_moves_the_rest(results: Any) -> None:
    for told in answers(results, "skipping_leaves_parameters_and_buffers_and_moves_the_rest"):
        assert told == {
            "returns the module": True,
            "nothing changed": True,
            "the rest": ["npu", True],
            "stopped": 2,
        }


def test_a_warning_comes_once_for_each_line_and_the_move_goes_on(results: Any) -> None:
    [told] = answers(results, "warning_once_for_each_line")
    assert told["warnings"] == [
        ["culprits.py", "a move of FSDPDecoder to npu:0"],
        ["culprits.py", "a move of Mlp to npu:0 goes pa"],
    ]
    assert told["it went on"] and told["codes"] == [["DK103b"], ["DK101"]]


EARLY = {
    "plain": "too early to guard: found it is not sharded, expected a model after fully_shard (at Decoder)",
    "meta": "too early to guard: found embed.weight is on meta",
    "loading": "too early to guard, or too late: found embed.weight is npu:0/cpu pinned before the first forward pass",
    "no model yet": "nothing to guard: found Engine without a model",
    "mode": "unknown on_move: found stop, expected raise, skip, warn",
}


@pytest.mark.parametrize("state", EARLY)
def test_it_says_clearly_that_it_is_too_early(state: str, results: Any) -> None:
    [told] = answers(results, "too_early")
    assert told[state].startswith(f"UsageError: {EARLY[state]}")
    assert told["broken"] == "passed"


def test_guards_may_be_nested_and_the_last_one_decides(results: Any) -> None:
    [told] = answers(results, "guards_may_be_nested_and_the_last_one_decides")
    assert told == {"inner": "passed", "outer": "MoveBlocked", "other": "passed"}


def test_a_guard_is_in_force_in_every_thread(results: Any) -> None:
    assert answers(results, "a_guard_is_in_force_in_every_thread") == [["MoveBlocked"] * 4]


def test_guards_recorders_and_attachments_leave_in_any_order_and_every_attribute_is_the_identical_object(
    results: Any,
) -> None:
    [told] = answers(results, "every_attribute_is_the_identical_object_again")
    assert told == {"left": [], "covers": []}


def test_a_recorder_beside_it_tells_whose_move_was_stopped(results: Any) -> None:
    [told] = answers(results, "a_recorder_tells_who_was_stopped")
    assert told == {"type": "MoveBlocked", "line": "model.to(device)", "findings": 0}


def test_a_fault_of_the_guard_itself_lets_the_move_pass_and_is_told_once(results: Any) -> None:
    [told] = answers(results, "a_fault_of_the_guard_lets_the_move_pass")
    assert told["answers"] == ["passed", "passed"]
    assert told["warned"] == ["diagkit's guard could not judge a move: LookupError: a fault of ours"]


def test_a_guard_that_nobody_closes_keeps_no_model_alive(results: Any) -> None:
    [told] = answers(results, "a_guard_keeps_no_model_alive")
    assert told == {"alive": [False] * 3, "others move": "npu", "repr": "<Guard of FSDPDecoder, closed>"}


# ---- the engines at the revision of the bug report

ENGINES = ["fsdp", "veomni", "fsdp with param_offload", "veomni with param_offload"]


@pytest.mark.parametrize("engine", ENGINES)
def test_skipping_makes_of_the_engine_before_the_fix_the_fixed_one(engine: str, results: Any) -> None:
    for told in answers(results, "engines"):
        skipped, fixed = told[f"{engine}, skip"], told[f"{engine}, fixed"]
        for operation in ("train", "save", "load", "export"):
            assert skipped[operation] == fixed[operation], operation
        assert skipped["to"] is None and skipped["train again"] == fixed["train"]  # `load` took it back to the start
        assert not {"DK101", "DK103a", "DK103b", "DK604"} & set(skipped["codes"])
        assert "DK101" in fixed["codes"]  # its own `to` is unguarded to this day


@pytest.mark.parametrize("engine", ENGINES)
def test_raising_stops_just_the_operations_that_move(engine: str, results: Any) -> None:
    # VeOmni's engine moves in load and train, too, when its own offload is on beside the policy.
    moves = {"save", "export", "to"} | ({"train", "load", "train again"} if engine == ENGINES[3] else set())
    for told in answers(results, "engines"):
        stopped = {
            op for op, said in told[f"{engine}, raise"].items() if str(said).startswith("MoveBlocked: a move of")
        }
        assert stopped == moves
        assert "DK101" not in told[f"{engine}, raise"]["codes"]


@pytest.mark.parametrize("engine", ENGINES)
def test_warning_lets_the_engine_fail_as_it_did(engine: str, results: Any) -> None:
    for told in answers(results, "engines"):
        assert told[f"{engine}, warn"] == ["Attempted to set the storage o", "MoveWarning"]
