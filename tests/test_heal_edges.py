"""`dk.heal` called in odd states, given odd optimizers, or failing half-way, on the simulated accelerator."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def results(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of each story answered."""
    folder = tmp_path_factory.mktemp("heal_edges")
    command = [sys.executable, str(ROOT / "tests" / "heal_edges_ranks.py"), str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "results.json").read_text())
    return {story: [(rank or {}).get("told", rank) for rank in ranks] for story, ranks in found.items()}


# ---- who calls


@pytest.mark.parametrize(
    ("case", "mended"), [("all", ["parameters", "optimizer state"]), ("buffers", ["buffers"])], ids=["all", "buffers"]
)
def test_what_is_mended_in_inference_mode_can_be_trained(case: str, mended: list[str], results: Any) -> None:
    kinds, inference, losses, values = results["what_is_mended_in_inference_mode_can_be_trained"][0][case]
    assert kinds == mended
    assert not inference and losses and values


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_it_is_refused_while_another_thread_is_in_a_pass(which: str, results: Any) -> None:
    [told] = results["another_thread_is_in_a_pass"]
    assert told[which].startswith(
        f"UsageError: heal was called in the middle of a {which} pass that another thread is in"
    )
    assert told["at rest"] == "nothing to mend (simulated accelerator)"
    assert told["same"], "the pass went on as in a run that nobody disturbed"


# ---- what is given


def test_optimizer_state_in_lists_tuples_and_dicts_comes_home_too(results: Any) -> None:
    [told] = results["state_in_lists_tuples_and_dicts"]
    assert "42 tensors of optimizer state: on the CPU" in told["text"] and "embed.weight [all.0]" in told["text"]
    assert told["types"] == ["Pair", [1]]
    assert told["again"] == "nothing to mend (simulated accelerator)" and told["losses"]


def test_parts_of_the_state_that_share_a_tensor_share_one_afterwards(results: Any) -> None:
    assert results["parts_that_share_a_tensor"] == [{"kinds": ["optimizer state"], "one": True, "apart": True}]


def test_the_step_of_a_fused_optimizer_comes_home_where_it_was_born(results: Any) -> None:
    [told] = results["a_fused_step_on_the_device"]
    assert told == {"born": ["cpu"], "steps": ["optimizer state"], "now": ["cpu"], "trains": 1}


@pytest.mark.parametrize("given", ["itself", "by name", "a generator", "wrapped"])
def test_optimizers_may_be_given_in_each_of_these_ways(given: str, results: Any) -> None:
    [told] = results["things_given_for_an_optimizer"]
    assert told[given].startswith("mended (simulated accelerator):\n  42 tensors of optimizer state: on the CPU")


@pytest.mark.parametrize(
    ("given", "named"),
    [("a scheduler", "LambdaLR"), ("a list with nothing in it", "NoneType"), ("a number", "int")],
    ids=lambda value: value,
)
def test_what_is_no_optimizer_is_refused_in_one_line(given: str, named: str, results: Any) -> None:
    [told] = results["things_given_for_an_optimizer"]
    assert told[given] == (
        f"UsageError: no optimizer: found {named}, expected an object with state and param_groups, or several by name"
        " or in a row. Pass the optimizer itself, without its scheduler."
    )


def test_state_that_is_no_dict_is_mended_as_well(results: Any) -> None:
    [told] = results["state_that_is_no_dict"]
    assert "3 tensors of optimizer state" in told["text"]
    assert told["now"] == ["cpu", "cpu", 1]


@pytest.mark.parametrize("how", ["twice", "with a part of it"])
def test_a_model_that_is_named_twice_counts_once(how: str, results: Any) -> None:
    [told] = results["models_named_twice"]
    assert told[how].startswith("mended (simulated accelerator):\n  14 parameters: on the CPU again")


# ---- what fails, and who disagrees


def test_what_could_not_be_mended_is_neither_counted_nor_named_as_mended(results: Any) -> None:
    [told] = results["what_failed_is_not_counted"]
    for step, start in zip(told["some"], ("13 of 14 parameters: on", "13 of 14 gradients: where"), strict=True):
        assert step["what"].startswith(start) and step["count"] == 13 and "head.weight" not in step["where"]
        assert [problem.partition(":")[0] for problem in step["problems"]] == ["head.weight"]
    assert [step["what"] for step in told["only"]] == ["1 parameter: not mended", "1 gradient: not mended"]
    assert "its parameter is not on cpu yet" in told["only"][1]["problems"][0]
    assert told["codes"] == [[], []] and told["whole"] == [False, False]
    assert told["then"].startswith("  1 parameter: on the CPU again")


def test_ranks_that_would_mend_other_parameters_of_one_kind_touch_nothing(results: Any) -> None:
    for told in results["ranks_that_would_mend_other_parameters"]:
        assert "rank 0: parameters layers.0.mlp.down." in told["refused"]
        assert "rank 1: parameters layers.1.mlp.down." in told["refused"]
        assert told["same"] and told["alone"] == "mended (simulated accelerator):"


def test_a_parameter_of_which_one_rank_has_nothing_parts_no_ranks(results: Any) -> None:
    first, second = results["a_parameter_of_which_one_rank_has_nothing"]
    assert "4 parameters: on the CPU again" in first and "2 parameters: on the CPU again" in second
