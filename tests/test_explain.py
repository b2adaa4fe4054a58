"""`dk.explain` on real exceptions: the right hazard by facts where one text has many causes, and none where none is."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from diagkit.torch_internals import torch_version

HERE = pathlib.Path(__file__).resolve().parent
# All ranks of all cases run within the first test's fixture.
pytestmark = pytest.mark.timeout(900)

# Case -> the hazard to blame.
HAZARDS = {
    "state_dict_of_a_split_model": "DK101",
    "get_model_state_dict_of_a_split_model": "DK101",
    "state_dict_after_training_and_a_move": "DK101",
    "state_dict_of_a_hand_made_split": "DK102",
    "state_dict_of_a_layer_alone": "DK101",
    "state_dict_on_two_ranks": "DK101",
    "detach_without_any_module_in_sight": "DK101",
    "view_without_any_module_in_sight": "DK101",
    "data_without_any_module_in_sight": "DK101",
    "a_new_parameter_without_any_module_in_sight": "DK101",
    "transpose_without_any_module_in_sight": "DK101",
    "export_in_a_generator": "DK101",
    "raised_from_another": "DK101",
    "an_engine_that_saves": "DK101",
    "first_forward_of_a_split_model": "DK101",
    "first_forward_of_a_moved_model": "DK103a",
    # Lazy init resets the child before it checks, and so turns the move past the reset into a split of that child.
    "first_forward_with_a_moved_child": "DK101",
    "first_step_of_an_engine_with_two_owners": "DK603",
    "backward_of_a_split_model": "DK101",
    "backward_of_a_moved_model": "DK103a",
    "backward_with_a_moved_child": "DK103b",
    "step_with_gradients_that_travelled": "DK301",
    "step_with_moments_moved_by_hand": "DK302",
    "step_with_moments_loaded_while_split": "DK302",
    "forward_with_buffers_on_the_cpu": "DK501",
    "step_of_a_hand_made_split": "DK102",
    "second_move_of_a_split_model": "DK101",
    "mending_a_hand_made_split_by_a_move": "DK102",
    "clipping_without_a_cpu_backend": "DK402",
    "gathering_without_a_cpu_backend": "DK402",
    "forward_of_a_model_on_meta": "DK104",
    "moving_a_model_on_meta": "DK104",
    "retry_after_it_was_mended": "DK601",
    "retry_while_it_is_still_split": "DK101",
    "retry_of_a_moved_model": "DK103a",
}
OPERATIONS = {
    "state_dict_of_a_split_model": "state_dict",
    "first_forward_of_a_split_model": "forward",
    "backward_of_a_split_model": "backward",
    "step_with_gradients_that_travelled": "optimizer.step",
    "clipping_without_a_cpu_backend": "clip_grad_norm_",
    "gathering_without_a_cpu_backend": "full_tensor",
    "second_move_of_a_split_model": ".to(device)",
}
# One text, and the cases that raise it for different reasons (None: for no reason of ours).
SAME_TEXT = {
    "Attempted to set the storage": {"DK101", "DK102"},
    "should be materialized on CPU": {"DK101", "DK103a", "DK603"},
    "attempting to assign a gradient": {"DK101", "DK103a", "DK103b"},
    "Expected all tensors to be on the same device": {"DK301", "DK302", "DK501", "DK102", None},
    "Couldn't swap": {"DK101", "DK102"},
    "has no attribute 'param_dtype'": {"DK601", "DK101", "DK103a"},
    "No backend type associated": {"DK402", None},
}


@pytest.fixture(scope="module")
def answers(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("explain")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run([sys.executable, str(HERE / "explain_ranks.py"), str(folder)], env=env, check=True, timeout=800)
    return dict(json.loads((folder / "results.json").read_text()))


Answers = dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize("case", HAZARDS)
def test_the_hazard_behind_a_real_exception_is_named(answers: Answers, case: str) -> None:
    for answer in answers[case]:
        assert answer["code"] == HAZARDS[case], answer["text"]
        assert answer["certain"] is True
        assert answer["findings"][0]["where"], "it says which tensors"
        assert answer["findings"][0]["remedy"] in answer["text"]
        assert answer["where"], "it says whose line it was"
        assert all("(simulated accelerator)" in answer[form] for form in ("text", "html")) and answer["simulated"]
        if case in OPERATIONS:
            assert answer["operation"] == OPERATIONS[case]


def test_ordinary_errors_are_not_ours(answers: Answers) -> None:
    ordinary = {case: found for case, found in answers.items() if case.startswith("ordinary")}
    assert len(ordinary) >= 15
    for case, found in ordinary.items():
        for answer in found:
            assert answer["code"] is None, f"{case}: {answer['text']}"
            assert "not an FSDP2 residency problem" in answer["text"]


def test_every_case_is_asked_about(answers: Answers) -> None:
    assert len(HAZARDS) >= 25
    assert {case for case in answers if not case.startswith("ordinary")} == set(HAZARDS)


@pytest.mark.parametrize("text", SAME_TEXT)
def test_equal_texts_with_different_causes_are_told_apart(answers: Answers, text: str) -> None:
    codes = {answer["code"] for found in answers.values() for answer in found if text in answer["error"]}
    assert codes == SAME_TEXT[text]


def test_no_frame_needs_to_hold_the_model(answers: Answers) -> None:
    if torch_version() < (2, 13):
        pytest.skip("torch version: DTensor's own frames hold a `self` before 2.13")
    blind = [case for case in HAZARDS if not answers[case][0]["held"]]
    assert len(blind) >= 5, blind
    assert all(answers[case][0]["code"] == HAZARDS[case] for case in blind)


def test_the_first_error_is_blamed_where_a_later_one_only_follows(answers: Answers) -> None:
    still_split = answers["retry_while_it_is_still_split"][0]
    assert [f["code"] for f in still_split["findings"]] == ["DK101", "DK601"]
    assert still_split["findings"][1]["follows"] == "DK101"
    raised_from = answers["raised_from_another"][0]
    assert raised_from["code"] == "DK101" and "Attempted to set the storage" in raised_from["error"]
    swap = answers["second_move_of_a_split_model"][0]
    assert "Attempted to set the storage" in swap["earlier"]


def test_explaining_is_quick(answers: Answers) -> None:
    slowest = max(answer["seconds"] for found in answers.values() for answer in found)
    assert slowest < 5
