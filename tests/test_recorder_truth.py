"""Whatever is done to a sharded model, in any order: the trace says at the end of each phase what is true.

Two simulated ranks do things at random (`recorder_truth.py`) and note the truth themselves.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any, NamedTuple

import pytest
from ranks import run_ranks

from diagkit.trace import open_trace
from diagkit.trace.schema import TENSOR_KINDS, GroupFacts, OptimizerFacts, Residency

HERE = pathlib.Path(__file__).resolve().parent
MODELS = 8


class Run(NamedTuple):
    folder: pathlib.Path
    told: list[list[dict[str, Any]]]  # by rank and model


@pytest.fixture(scope="module")
def run(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("truth")
    seed = str(time.time_ns() % 10_000)
    print(f"seed {seed}")
    results = run_ranks(HERE / "recorder_truth.py", 2, args=[str(folder), seed], timeout=280)
    return Run(folder, [json.loads(result.stdout.splitlines()[-1]) for result in results])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", range(MODELS))
def test_the_trace_says_what_is_true(run: Run, model: int, rank: int) -> None:
    trace = open_trace(run.folder / str(model))[rank]
    assert trace.problems == [] and trace.troubles == []
    done = run.told[rank][model]["done"]
    assert len(trace.phases) == len(done) + 1
    history: list[str] = []
    before: dict[str, tuple[int, int]] = {}  # address and generation of each storage at the end of the last phase
    for ordinal, (name, error, true, groups, trained) in enumerate(done, 1):
        phase = trace.phases[ordinal]
        history.append(f"{name} ({error})" if error else name)
        assert phase.name == name and phase.exit is not None
        state = trace.state(phase.exit)
        addresses = {key: value.pop() for key, value in true.items() if len(value) > 1}
        said: dict[str, list[Any]] = {}
        told: dict[str, list[Any]] = {}
        gathered = [key for key, value in true.items() if value == ["gathered"]]
        for row in trace.rows:
            facts = trace.facts[state.facts[row.id]]
            if row.kind in TENSOR_KINDS and isinstance(facts, Residency):
                said[f"{row.kind}/{row.name}/{row.part}"] = [
                    facts.metadata_device,
                    facts.storage_device,
                    f"torch.{facts.dtype}",
                    facts.pinned,
                    facts.requires_grad,
                ]
            elif isinstance(facts, GroupFacts):
                told[row.name] = [facts.sharded_state, facts.training_state, facts.root]
            elif isinstance(facts, OptimizerFacts):
                assert [facts.parameters, facts.missing, facts.dead] == [*trained, 0], history
        assert told == groups, history
        for key in gathered:  # the trace tells the sharded parameter that stands behind, and what hangs on it
            assert said.pop(key)
            del true[key]
            parameter = key.split("/")[1]
            for other in [k for k in said if k.split("/")[1] == parameter and k.split("/")[0] != "parameter"]:
                del said[other]
        generations = {f"{row.kind}/{row.name}/{row.part}": state.generations[row.id] for row in trace.rows}
        now = {key: (addresses[key], generations[key]) for key in addresses if not key.startswith("gradient")}
        for key in now.keys() & before.keys():
            exchanged = now[key][0] != before[key][0]
            assert (now[key][1] > before[key][1]) == exchanged, (key, history)
        before = now
        wrong = {key: (said.get(key), true.get(key)) for key in {*said, *true} if said.get(key) != true.get(key)}
        assert not wrong, (wrong, history)


def test_much_was_done_and_much_of_it_worked(run: Run) -> None:
    done = [(name, error) for model in run.told[0] for name, error, *_ in model["done"]]
    assert len(done) == MODELS * 26
    assert len({name for name, error in done if not error}) > 15
    states = [true for model in run.told[0] for _, _, true, *_ in model["done"]]
    assert sum(any(value[0] != value[1] for value in true.values() if len(value) > 1) for true in states) > 10
