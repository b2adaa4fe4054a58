"""Fifty steps with a checkpoint on the way: what a job computes does not depend on whether it is recorded."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from typing import Any, NamedTuple

import pytest
from ranks import run_ranks

from diagkit.trace import RankTrace, open_trace
from diagkit.trace.schema import CALL, ENTER, EXIT, MARK, OPTIMIZER_STATE, PARAMETER, Residency

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 50
PARAMETERS = 21

RESULTS = ("losses", "weights", "gradients", "buffers", "optimizer", "exported", "files", "metadata", "random")


class Run(NamedTuple):
    folder: pathlib.Path
    told: list[dict[str, dict[str, Any]]]  # by rank


@pytest.fixture(scope="module")
def run(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("harmless")
    results = run_ranks(HERE / "harmless_training.py", 2, args=[str(folder)], timeout=280)
    return Run(folder, [json.loads(result.stdout.splitlines()[-1]) for result in results])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("way", ["recorded", "full", "bare_again"])
def test_a_recorded_run_equals_a_bare_one_bit_for_bit(run: Run, way: str, result: str, rank: int) -> None:
    assert run.told[rank][way][result] == run.told[rank]["bare"][result]


def test_the_job_that_is_compared_is_a_real_one(run: Run) -> None:
    first, second = (told["bare"] for told in run.told)
    assert len(set(first["losses"])) == STEPS
    assert float.fromhex(first["losses"][-1]) < float.fromhex(first["losses"][0]) / 2
    assert first["losses"] != second["losses"]  # each rank has batches of its own
    assert first["weights"] != second["weights"]  # and shards of its own
    assert first["exported"] == second["exported"]
    assert len(first["files"]) == 4 and len(set(first["files"].values())) == 4


# What the job calls, by phase: the calls that PyTorch makes inside these are counted with them.
CALLS = {
    ("train", "first forward"): 1,
    ("train", "FSDPParam.reset_sharded_param"): PARAMETERS,  # by the first forward, on each parameter
    ("train", "backward end"): STEPS,
    ("train", "Optimizer.step"): STEPS,
    ("save", "get_model_state_dict"): 1,
    ("save", "Module.state_dict"): 1,
    ("save", "get_optimizer_state_dict"): 1,
    ("save", "Optimizer.state_dict"): 1,
    ("save", "dcp.save"): 1,
    ("load", "get_model_state_dict"): 1,
    ("load", "Module.state_dict"): 1,
    ("load", "get_optimizer_state_dict"): 1,
    ("load", "Optimizer.state_dict"): 1,
    ("load", "dcp.load"): 1,
    ("load", "set_model_state_dict"): 1,
    ("load", "Module.load_state_dict"): 1,
    ("load", "FSDPParam.reset_sharded_param"): PARAMETERS,
    ("load", "set_optimizer_state_dict"): 1,
    ("load", "Optimizer.load_state_dict"): 1,
    ("export", "Module.state_dict"): 1,
}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_observed_call_is_counted_in_its_phase(run: Run, rank: int) -> None:
    counted: Counter[tuple[str, str]] = Counter()
    for phase in trace_of(run, rank).phases.values():
        counted.update({(phase.name, name): count for name, count in phase.calls.items()})
    assert dict(counted) == CALLS


MOMENTS = {
    (MARK, "start"): 1,
    (ENTER, "train: enter"): STEPS,
    (EXIT, "train: exit"): STEPS,
    (CALL, "first forward"): 1,
    (CALL, "Optimizer.step"): 1,  # the first one makes the states; the others change no residency
    (ENTER, "save: enter"): 1,
    (EXIT, "save: exit"): 1,
    (ENTER, "load: enter"): 1,
    (EXIT, "load: exit"): 1,
    (ENTER, "export: enter"): 1,
    (EXIT, "export: exit"): 1,
    (CALL, "get_model_state_dict"): 3,  # save, load, and the last save outside any phase
    (CALL, "get_optimizer_state_dict"): 3,
    (CALL, "dcp.save"): 2,
    (CALL, "dcp.load"): 1,
    (CALL, "set_model_state_dict"): 1,
    (CALL, "set_optimizer_state_dict"): 1,
    (CALL, "Module.state_dict"): 1,
    (MARK, "end"): 1,
}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_moment_is_there_and_no_other(run: Run, rank: int) -> None:
    assert dict(Counter((moment.kind, moment.label) for moment in trace_of(run, rank).moments)) == MOMENTS


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_moved_and_the_first_step_made_the_states(run: Run, rank: int) -> None:
    trace = trace_of(run, rank)
    moved = [t for t in trace.transitions() if t.rows[0].kind == PARAMETER]
    if tuple(map(int, trace.header.torch.split(".")[:2])) < (2, 13):
        # There, first forward and load give padded shards a storage of their own.
        moved = [t for t in moved if t.before != t.after]
    assert moved == []
    parts = Counter(row.part for row in trace.rows if row.kind == OPTIMIZER_STATE)
    assert parts == {"exp_avg": PARAMETERS, "exp_avg_sq": PARAMETERS, "step": PARAMETERS}
    [step] = [moment for moment in trace.moments if moment.label == "Optimizer.step"]
    before, after = trace.state(step.index - 1), trace.state(step)
    made = [row for row in trace.rows if after.facts[row.id] and not before.facts[row.id]]
    assert Counter(row.kind for row in made)[OPTIMIZER_STATE] == 3 * PARAMETERS
    facts = {trace.facts[after.facts[row.id]] for row in made if row.part.startswith("exp_avg")}
    assert {f.short() for f in facts if isinstance(f, Residency)} == {"cpu/cpu"}


@pytest.mark.parametrize("way", ["recorded", "full"])
def test_no_problem_and_no_trouble(run: Run, way: str) -> None:
    trace = open_trace(run.folder / way / "trace")
    assert trace.problems == []
    assert [rank.troubles for rank in trace] == [[], []]
    assert [rank.ended for rank in trace] == ["closed", "closed"]


def test_both_ranks_share_one_table(run: Run) -> None:
    first, second = open_trace(run.folder / "recorded" / "trace")
    assert first.rows == second.rows
    assert first.local_shapes != second.local_shapes


def trace_of(run: Run, rank: int) -> RankTrace:
    return open_trace(run.folder / "recorded" / "trace")[rank]
