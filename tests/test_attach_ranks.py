"""`dk.attach` on the lab's engines, on two real ranks: the story is told, and the job is the same job."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import attach_ranks
import pytest
from ranks import run_ranks

from diagkit.trace import Trace, open_trace
from diagkit.trace.schema import EXPORT


@pytest.fixture(scope="module")
def folder(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def answer(folder: pathlib.Path) -> dict[str, Any]:
    results = run_ranks(attach_ranks.main, 2, args=[str(folder)], timeout=250)
    told: dict[str, Any] = json.loads(results[0].stdout.splitlines()[-1])
    return told


def trace(folder: pathlib.Path, name: str) -> Trace:
    found = open_trace(folder / name)
    assert found.problems == []
    assert [rank.troubles for rank in found] == [[], []]
    return found


@pytest.mark.parametrize("revision", ["before", "current"])
def test_an_attached_engine_does_what_it_does_alone(revision: str, answer: dict[str, Any]) -> None:
    assert answer[f"{revision} attached"] == answer[f"{revision} alone"]
    assert answer[f"{revision} covers left"] == []
    crashes = "Attempted to set the storage of a tensor on device"
    assert str(answer[f"{revision} alone"]["save"]).startswith(crashes) == (revision == "before")


@pytest.mark.usefixtures("answer")
def test_the_unguarded_save_is_explained_by_the_engines_own_line(folder: pathlib.Path) -> None:
    found = {finding.code: finding for finding in trace(folder, "before").findings()}
    finding = found["DK101"]
    assert (finding.phase, finding.ranks) == ("save", (0, 1))
    assert finding.cause.chain[:3] == ("FSDPEngine.save_checkpoint", "FSDPEngine._load_model", "load_model_to_device")
    assert finding.cause.frame.code == "module.to(device)"


@pytest.mark.usefixtures("answer")
def test_the_guarded_engine_is_silent_and_its_phases_nest_as_its_calls_do(folder: pathlib.Path) -> None:
    told = trace(folder, "current")
    assert told.findings() == []
    phases = [(p.name, p.label.partition(".")[2], p.parent) for p in told[1].phases.values() if p.ordinal]
    assert phases == [
        ("init", "initialize", 0),
        ("move", "to", 1),
        ("train", "train_mode", 0),
        ("train", "train_batch", 3),
        ("train", "train_batch", 3),
        ("move", "to", 3),
        ("save", "save_checkpoint", 0),
        ("export", "get_per_tensor_param", 0),
        ("export", "get_per_tensor_param: consumed", 0),
    ]


@pytest.mark.usefixtures("answer")
def test_exported_tensors_are_recorded_where_the_consumer_got_them(folder: pathlib.Path) -> None:
    told = trace(folder, "current")[0]
    consumed = next(p for p in told.phases.values() if p.label.endswith("consumed"))
    rows = [row for row in told.rows if row.kind == EXPORT]
    assert len(rows) == len([row for row in told.rows if row.kind == "parameter"])
    moment = next(m for m in told.moments if m.label.endswith(" tensors"))
    assert moment.phase == consumed.ordinal
    facts = told.state(moment).facts
    assert {told.facts[facts[row.id]].storage_device for row in rows} == {"npu:0"}  # type: ignore[union-attr]


@pytest.mark.usefixtures("answer")
def test_two_engines_of_one_class_have_each_their_own_rows(folder: pathlib.Path) -> None:
    told = trace(folder, "two")[0]
    assert {row.model for row in told.rows} == {"actor", "ref"}
    assert [row.model for row in told.rows if row.kind == "engine"] == ["actor", "ref"]
    assert sorted(row.model for row in told.rows if row.kind == "optimizer") == ["actor", "ref"]
    assert {row.model for row in told.rows if row.kind == EXPORT} == {"ref"}
