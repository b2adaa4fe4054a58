"""What must stay silent: every negative control and every healthy life of both engines, live and at every detail."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from diagkit.diagnosis import diagnose
from diagkit.trace import open_trace
from diagkit.trace.schema import DETAILS

HERE = pathlib.Path(__file__).resolve().parent
# All ranks of all scenarios run within the first test's fixture.
pytestmark = pytest.mark.timeout(900)

CONTROLS = [
    "pinned_policy",
    "looked_at_by_a_monitor",
    "unpinned_policy",
    "root_left_gathered",
    "one_visible_device",
    "buffers_always_on_the_cpu",
    "export_copies",
    "nothing_on_this_rank",
    "two_dimensional_mesh",
    "moved_by_hand_without_the_policy",
    "fsdp1_moved_by_hand",
    "cpu_mesh",
    "split_for_a_moment",
    "a_failure_that_has_nothing_to_do_with_it",
    "shards_in_wrappers",
]
JOBS = [
    "gradient_accumulation",
    "activation_checkpointing",
    "frozen_parameters",
    "a_part_is_trained",
    "several_optimizers",
    "tied_embeddings",
    "mixed_precision",
    "groups_of_other_dtypes",
    "another_model_and_its_optimizer",
    "actor_and_reference",
    "loaded_by_assignment_first",
    "loaded_by_broadcast",
    "ignored_parameters",
    "fsdp1_flat",
]
REVISIONS = ("before", "6463", "6604", "7005", "7103", "current")
LIVES = [
    f"engine_{engine}_{revision}_{flags}_{group}"
    for engine in ("fsdp", "veomni")
    for revision in REVISIONS
    for flags, group in (("policy", "mixed"), ("both", "mixed"), ("manual", "mixed"), ("policy", "alone"))
]


@dataclass
class Ran:
    folder: pathlib.Path
    answers: dict[str, list[dict[str, Any] | None]]


def run(folder: pathlib.Path, *only: str) -> Ran:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run(
        [sys.executable, str(HERE / "healthy_ranks.py"), str(folder), *only], env=env, check=True, timeout=800
    )
    return Ran(folder, json.loads((folder / "results.json").read_text()))


@pytest.fixture(scope="module")
def ran(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("healthy"))


def test_every_scenario_is_asked_about(ran: Ran) -> None:
    assert set(ran.answers) == {*CONTROLS, *JOBS, *LIVES}


@pytest.mark.parametrize("name", [*CONTROLS, *JOBS, *LIVES])
def test_a_healthy_state_is_silent(ran: Ran, name: str) -> None:
    for answer in ran.answers[name]:
        assert answer is not None and "error" not in answer, answer
        looks = {label: said for label, said in answer.items() if f"{label} notes" in answer}
        assert looks and all(said == [] for said in looks.values()), looks
        assert all(answer[f"{label} problems"] == [] for label in looks)
    for detail in DETAILS:
        trace = open_trace(ran.folder / name / detail)
        assert not trace.problems
        assert len(trace) == len(ran.answers[name])
        findings = diagnose(trace)
        assert not findings, f"{detail}: {findings}"


def test_the_controls_are_what_they_say(ran: Ran) -> None:
    """A control that is not in the odd state that it stands for proves nothing."""
    first = {name: answers[0] or {} for name, answers in ran.answers.items()}
    assert first["looked_at_by_a_monitor"]["looks"] == ["in forward", "in backward"]
    assert first["root_left_gathered"]["plain in the slot"] is True
    assert (ran.answers["nothing_on_this_rank"][1] or {})["elements"] == 0
    assert first["export_copies"]["exported"] == ["npu"]
    assert "on the CPU" in first["buffers_always_on_the_cpu"]["trained notes"][0]
    mesh = open_trace(ran.folder / "two_dimensional_mesh" / "transitions")
    assert any("(2, 1)" in getattr(facts, "mesh", "") for facts in mesh[0].facts)
    split = open_trace(ran.folder / "split_for_a_moment" / "transitions")
    assert any(getattr(facts, "split", False) for facts in split[0].facts)


def test_the_jobs_are_what_they_say(ran: Ran) -> None:
    def shown(name: str) -> list[Any]:
        return list(open_trace(ran.folder / name / "full")[0].facts)

    assert any(getattr(facts, "sharded_state", None) == "unsharded" for facts in shown("gradient_accumulation"))
    assert any(getattr(facts, "shares", None) == "tie" for facts in shown("tied_embeddings"))
    assert any(getattr(facts, "dead", 0) == 14 for facts in shown("another_model_and_its_optimizer"))
    assert any(getattr(facts, "missing", 0) > 0 for facts in shown("a_part_is_trained"))
    assert {True, False} <= {facts.offload for facts in shown("actor_and_reference") if hasattr(facts, "offload")}
    odd = [facts for facts in shown("shards_in_wrappers") if getattr(facts, "wrapper", "") == "DTensor"]
    assert odd and all((facts.dtype, facts.storage_dtype) == ("bfloat16", "bfloat16") for facts in odd)
    assert all(facts.aliased for facts in odd)


def test_the_momentary_split_is_in_the_trace_of_every_revision_and_is_no_fault(ran: Ran) -> None:
    for revision in REVISIONS:
        trace = open_trace(ran.folder / f"engine_fsdp_{revision}_policy_mixed" / "transitions")
        assert any(getattr(facts, "split", False) for facts in trace[0].facts)


def test_the_engines_did_what_they_can(ran: Ran) -> None:
    def done(name: str) -> list[str]:
        return list((ran.answers[name][0] or {})["done"])

    assert done("engine_fsdp_current_policy_mixed") == ["train", "save", "load", "export"]
    assert done("engine_fsdp_6463_policy_mixed") == ["train", "export"]
    assert done("engine_veomni_7103_both_mixed") == ["save", "load", "export"]
    assert done("engine_veomni_before_manual_mixed") == ["train", "save", "load", "export"]
