"""`dk.heal` on forked ranks of the simulated accelerator: each hazard is brought about, mended, and trained on.

Every case has a twin that never broke; five steps after the heal both must be the same, bit for bit.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import heal_ranks
import pytest

from diagkit.diagnosis.rule import Rule, find_rules
from diagkit.remedy.mend import ANSWERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = pathlib.Path(__file__).resolve().parent.parent
Results = dict[str, list[Any]]

#: What each case's heal says that it mended.
MENDED: dict[str, list[tuple[str, list[str]]]] = {
    "split": [("parameters", ["DK101"])],
    "split before the first forward": [("parameters", ["DK101"])],
    "split with gradients": [("parameters", ["DK101"]), ("gradients", ["DK301"])],
    "split, and a crash while saving": [("parameters", ["DK101"])],
    "split, and a crash in backward": [("pass", ["DK604"]), ("parameters", ["DK101"])],
    "split by hand": [("parameters", ["DK102"])],
    "wholly moved": [("parameters", ["DK103a"])],
    "wholly moved with gradients": [("parameters", ["DK103a"]), ("gradients", [])],
    "a child moved past the reset": [("parameters", ["DK103b"])],
    "a child moved before the first forward": [("parameters", ["DK103b"])],
    "a child moved with gradients": [("parameters", ["DK103b"]), ("gradients", [])],
    "buffers dragged to the CPU": [("pass", []), ("buffers", ["DK501"])],
    "moments loaded while split": [("parameters", ["DK101"]), ("optimizer state", ["DK302"])],
    "moments moved by hand": [("optimizer state", ["DK302"])],
    "moments split": [("optimizer state", ["DK303"])],
    "poisoned lazy init": [("pass", []), ("lazy init", ["DK601"])],
    "poisoned lazy init, still split": [("pass", []), ("parameters", ["DK101"]), ("lazy init", ["DK601"])],
    "aborted backward": [("pass", ["DK604"])],
    "aborted backward at its end": [("pass", ["DK604"])],
    "aborted backward, and training went on": [("pass", ["DK604"])],
    "aborted forward": [("pass", [])],
    "aborted forward between micro-batches": [("pass", [])],
    "pins lost": [("parameters", ["DK701"])],
    "trained and gathered are two": [("parameters", ["DK201"])],
    "everything at once": [("pass", ["DK604"]), ("parameters", ["DK101"]), ("optimizer state", ["DK302"])],
    "split, and hccl alone": [("parameters", ["DK101"])],
}


@pytest.fixture(scope="module")
def results(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("heal")
    command = [sys.executable, str(ROOT / "tests" / "heal_ranks.py"), str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-4000:]
    found: Results = json.loads((folder / "results.json").read_text())
    return found


def told(results: Results, story: str) -> list[Any]:
    """What each rank of a story answered."""
    assert all(rank and "error" not in rank for rank in results[story]), results[story]
    return [rank["told"] for rank in results[story]]


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def answers(case: str, ranks: int, results: Results) -> list[dict[str, Any]]:
    found = results[f"{case} on {ranks}"]
    assert len(found) == ranks and all(rank and "error" not in rank for rank in found), found
    return found


every_case = pytest.mark.parametrize("case", heal_ranks.CASES)


@every_case
def test_five_steps_after_the_heal_are_those_of_a_run_that_never_broke(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["values"], "weights and moments, right after the heal"
        assert answer["losses"], "losses of five steps"
        assert answer["values at the end"] and answer["saved"]


@every_case
def test_each_hazard_is_mended_by_its_own_step_and_nothing_is_left(case: str, answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert [(step["kind"], step["codes"]) for step in answer["json"]["steps"]] == MENDED[case]
        assert answer["codes after"] == [] and answer["json"]["left"] == []
        assert all(step["problems"] == [] for step in answer["json"]["steps"])


@every_case
def test_parameters_stay_the_objects_that_the_optimizer_holds(answers: list[dict[str, Any]]) -> None:
    assert all(answer["the same objects"] for answer in answers)


@every_case
def test_a_dry_run_showed_that_very_plan(answers: list[dict[str, Any]]) -> None:
    assert all(answer["planned"] for answer in answers)


@every_case
def test_a_second_heal_finds_nothing_and_touches_nothing(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["again"] == ["nothing to mend (simulated accelerator)", True]


def test_it_says_what_it_did_in_text_page_and_json(results: Results) -> None:
    answer = results["everything at once on 1"][0]
    assert answer["text"].splitlines()[:3] == [
        "mended (simulated accelerator):",
        "  a backward pass that an exception broke off: over; groups idle and sharded, its gradients dropped (DK604)",
        "    FSDPDecoder, layers.{0,1} ×2",
    ]
    assert (
        "  14 parameters: on the CPU again; metadata, bytes and what all-gather reads are one (DK101)" in answer["text"]
    )
    assert answer["text"].endswith("note: the step that broke off must be done anew, from its first micro-batch")
    for step in answer["json"]["steps"]:
        assert html.escape(step["what"]) in answer["html"] and step["what"] in answer["text"]
        assert step["count"] > 0 and step["where"]


@pytest.mark.parametrize("policy", ["pinned", "unpinned", "none"])
def test_a_healthy_model_is_not_touched(policy: str, results: Results) -> None:
    for rank in told(results, "a_healthy_model_is_not_touched"):
        states = {name: answer for name, answer in rank.items() if name.startswith(policy)}
        assert len(states) == 3
        assert all(answer == ["nothing to mend (simulated accelerator)", True] for answer in states.values())


def test_a_dry_run_touches_nothing_and_asks_no_other_rank(results: Results) -> None:
    first, other = told(results, "a_dry_run_touches_nothing_and_asks_nobody")
    assert first["text"].startswith("would mend (simulated accelerator):\n  14 parameters: on the CPU again")
    assert first["same"] and other is None


def test_ranks_that_disagree_touch_nothing_until_they_are_told_to_go_alone(results: Results) -> None:
    for answer in told(results, "ranks_that_disagree_touch_nothing"):
        assert answer["refused"].startswith(
            "RanksDisagree: the ranks would mend different things, so nothing was touched:"
            " found rank 0: parameters, gradients; rank 1: nothing, expected the same on every rank."
        )
        assert answer["same"] and answer["losses"] == 2
        assert answer["together"] == "nothing to mend (simulated accelerator)"
    assert [answer["alone"].partition(" ")[0] for answer in told(results, "ranks_that_disagree_touch_nothing")] == [
        "mended",
        "nothing",
    ]


def test_a_rank_that_does_not_call_costs_the_others_a_timeout_and_no_more(results: Results) -> None:
    for other, answer in zip(
        (1, 0), told(results, "a_rank_that_does_not_call_costs_the_others_a_timeout"), strict=True
    ):
        assert f"no word within 0.3 s from rank {other} of 2" in answer["refused"]
        assert answer["then"] == "mended (simulated accelerator):"


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_it_is_refused_in_the_middle_of_a_pass(which: str, results: Results) -> None:
    [answer] = told(results, "heal_is_refused_inside_a_pass")
    assert answer[which].startswith(f"UsageError: heal was called in the middle of a {which} pass")


def test_what_it_cannot_mend_it_leaves_and_says_so(results: Results) -> None:
    [answer] = told(results, "what_it_cannot_mend_it_leaves_and_says_so")
    assert answer["meta"].startswith("nothing that can be mended (simulated accelerator)\nleft as it is:\n  DK104 ")
    assert "left as it is:\n  DK202 " in answer["dead"]
    assert "not done: head.weight: RuntimeError: Cannot swap t1 because it has weakref" in answer["weakly held"]
    assert "  DK101 Pinned split" in answer["weakly held"].partition("left as it is:")[2]
    assert answer["nothing"].startswith("UsageError: nothing to heal: found int")


def test_of_two_values_it_keeps_the_trained_one_and_says_so(results: Results) -> None:
    [answer] = told(results, "values_that_differ_are_told")
    assert "note: 4 parameters had two different values (layers.0.mlp.up.weight, " in answer["text"]
    assert answer["kept"]


def test_buffers_that_rest_on_the_cpu_stay_unless_one_asks(results: Results) -> None:
    [answer] = told(results, "buffers_that_rest_on_the_cpu_stay_unless_one_asks")
    assert answer["first"] == "nothing to mend (simulated accelerator)" and answer["at rest"] == "cpu"
    assert "1 buffer: on the accelerator again" in answer["second"] and answer["then"] == "npu:0"


@pytest.mark.parametrize("engine", ["fsdp", "veomni"])
def test_an_engine_before_the_fix_goes_on_after_its_save_crashed(engine: str, results: Results) -> None:
    for answer in told(results, "engines"):
        assert answer[engine] == [["DK101"], True, ["DK901"]]  # the engine's flag is its own


def test_a_trace_tells_who_mended(results: Results) -> None:
    [answer] = told(results, "a_trace_tells_who_mended")
    assert answer == {
        "parameters": 14,
        "from": ["npu:0/cpu pinned"],
        "to": ["cpu/cpu pinned"],
        "line": "dk.heal(bench.model, bench.optimizer)",
        "chain": "dk.heal",
        "troubles": [],
        "at the end": [],
    }


CURABLE = [rule for code in sorted({code for codes in ANSWERS.values() for code in codes}) for rule in find_rules(code)]


@pytest.mark.parametrize("rule", CURABLE, ids=lambda rule: rule.code)
def test_the_lesson_of_each_curable_hazard_names_it(rule: Rule) -> None:
    assert "`dk.heal(model, optimizer" in rule.english["Remedy"]
    assert rule.english["Call"].startswith("dk.heal(model, optimizer")
    assert ("dk.guard(model)" in rule.english["Remedy"]) == (rule.code == "DK101")
