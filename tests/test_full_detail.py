"""Detail "full": one training step as a lifeline of each parameter, at no other detail and at no other price."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import diagkit as dk
from diagkit.diagnosis import diagnose
from diagkit.trace import RankTrace, open_trace
from diagkit.trace.schema import Moment, Residency

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(300)
LAYER = "layers.0.mlp.up.weight"
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("full")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run(
        [sys.executable, str(HERE / "events_ranks.py"), str(place), "full"], env=env, check=True, timeout=280
    )
    return place


@pytest.fixture(scope="module")
def answers(folder: pathlib.Path) -> Answers:
    found: Answers = json.loads((folder / "results.json").read_text())
    return found


def life(rank: RankTrace, name: str = LAYER, phase: int = 2) -> list[tuple[str, str | None, str]]:
    """(label, sharded state, gradient) wherever one of the last two is another one than before."""
    row = rank.row(name).id
    gradients = [r.id for r in rank.rows if r.kind == "gradient" and r.of == row]
    told: list[tuple[str, str | None, str]] = []
    for moment in rank.moments:
        state = rank.state(moment)
        facts, gradient = (rank.facts[state.facts[number]] for number in (row, *gradients))
        assert isinstance(facts, Residency)
        now = (facts.sharded_state, gradient.short() if isinstance(gradient, Residency) else "")
        if moment.phase == phase and (not told or told[-1][1:] != now):
            told.append((moment.label, *now))
    return told


def labelled(rank: RankTrace, label: str) -> list[Moment]:
    return [moment for moment in rank.moments if moment.label == label]


def test_one_step_is_a_lifeline_gathered_twice_and_its_gradient_comes_to_rest_on_the_cpu(folder: pathlib.Path) -> None:
    for rank in open_trace(folder / "full_step" / "full"):
        assert life(rank) == [
            ("train: enter", "sharded", "cpu/cpu pinned"),  # of the step before
            ("unshard", "sharded", ""),  # the root's; zero_grad came before it
            ("unshard", "unsharded", ""),
            ("reshard", "sharded", ""),
            ("unshard", "unsharded", ""),  # in backward
            ("reduce gradients", "sharded", "cpu/cpu pinned"),
        ]


def test_each_moment_names_its_group_and_the_line_that_is_to_thank(folder: pathlib.Path) -> None:
    (rank, _) = open_trace(folder / "full_step" / "full")
    reduced = labelled(rank, "reduce gradients")
    assert [m.cause.target for m in reduced if m.cause and m.phase == 1] == ["layers.1", "layers.0", "FSDPDecoder"]
    for moment in reduced:
        assert moment.cause is not None and moment.cause.frame is not None
        assert moment.cause.frame.code == "loss.backward()"  # autograd runs it in a thread of its own
        assert moment.cause.chain[-1] == "reshard" and "reduce gradients" in moment.cause.chain
    forward = labelled(rank, "unshard")[0].cause
    assert forward is not None and forward.frame is not None and forward.frame.function == "Bench.loss"
    calls = rank.phases[2].calls
    assert (calls["backward"], calls["unshard"], calls["reduce gradients"]) == (1, 5, 3)


def test_no_other_detail_hears_of_it_not_even_beside_a_full_one(folder: pathlib.Path) -> None:
    for rank in open_trace(folder / "full_step" / "transitions"):
        assert {m.label for m in rank.moments if m.kind == "call"} == {"first forward", "Optimizer.step"}
        assert set(rank.phases[2].calls) == {"backward end", "Optimizer.step"}


def test_a_full_recording_of_healthy_training_finds_nothing(folder: pathlib.Path, answers: Answers) -> None:
    for name in ("full_hsdp", "full_checkpointing", "full_fsdp1"):
        for answer in answers[name]:
            assert answer == {"same": True, "learnt": True, "live": []}, name
        trace = open_trace(folder / name)
        assert not diagnose(trace), name
        assert [rank.troubles + rank.problems for rank in trace] == [[], []]
    assert not diagnose(open_trace(folder / "full_step" / "full"))


def test_hsdp_is_recorded_with_its_mesh_and_its_lifeline(folder: pathlib.Path) -> None:
    for rank in open_trace(folder / "full_hsdp"):
        assert any("(2, 1) replicate x shard" in getattr(facts, "mesh", "") for facts in rank.facts)
        assert [state for _, state, _ in life(rank)].count("unsharded") == 3  # two forward passes and a backward


def test_a_checkpointed_layer_is_gathered_for_its_second_forward_within_backward(folder: pathlib.Path) -> None:
    for rank in open_trace(folder / "full_checkpointing"):
        name = "layers.0._checkpoint_wrapped_module.mlp.up.weight"
        assert [state for _, state, _ in life(rank, name)].count("unsharded") == 3
        assert labelled(rank, "reduce gradients")


def test_fsdp1_is_recorded_as_plain_tensors_on_the_accelerator(folder: pathlib.Path) -> None:
    for rank in open_trace(folder / "full_fsdp1"):
        parameters = [row.id for row in rank.rows if row.kind == "parameter"]
        end = rank.state(-1)
        found = {rank.facts[end.facts[row]].short() for row in parameters}  # type: ignore[union-attr]
        assert found == {f"npu:{rank.rank}/npu:{rank.rank}"}
        assert not labelled(rank, "unshard")


def test_a_backward_that_raises_is_told_with_the_line_that_called_it(folder: pathlib.Path) -> None:
    (rank,) = open_trace(folder / "full_failing_backward")
    (failed,) = rank.failures
    assert failed.label == "backward: ValueError" and failed.cause is not None and failed.cause.frame is not None
    assert failed.cause.frame.code == "loss.backward()"
    assert diagnose(rank).codes == ("DK604",)


# ---- what is patched, and when


def originals() -> dict[str, object]:
    names = ("_to_sharded", "_to_unsharded", "_to_sharded_post_forward", "post_backward")
    return {
        **{name: vars(FSDPParamGroup)[name] for name in names},
        "backward": torch.autograd._engine_run_backward,
        **{name: getattr(torch.Tensor, name) for name in ("to", "cpu", "copy_", "sum", "__array__")},
        "save": torch.save,
    }


def test_the_patches_of_a_full_recorder_go_with_it_and_not_with_the_last_one(tmp_path: pathlib.Path) -> None:
    before, model = originals(), nn.Linear(2, 2)
    with dk.record(model, out=tmp_path / "a"):
        assert originals() == before
        with dk.record(model, out=tmp_path / "b", detail="full"):
            assert not set(originals().values()) & set(before.values())
        assert originals() == before
        assert hasattr(nn.Module._apply, "__wrapped__")
    assert originals() == before and not hasattr(nn.Module._apply, "__wrapped__")
    assert not {"to", "cpu", "copy_", "sum"} & set(vars(torch.Tensor))  # inherited, as they were
