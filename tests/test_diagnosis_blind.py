"""What a diagnosis says where nothing could be looked at, where the recorder failed, and of groups and optimizers that
stand for nothing.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from torch import nn
from traces import engine_trace, on

import diagkit as dk
from diagkit.cli import main
from diagkit.diagnosis import diagnose
from diagkit.trace.merged import Trace
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import CALL, GROUP, PARAMETER, Change, GroupFacts, Header, Row
from diagkit.trace.writer import MemorySink, TraceWriter

FAULT = "watch: RuntimeError: no shape"


def _empty(rank: int, ranks: int = 1, troubles: tuple[str, ...] = (FAULT,)) -> RankTrace:
    trace = RankTrace()
    trace.header = Header(run="test", rank=rank, world_size=ranks)
    trace.troubles += troubles
    return trace


def test_nothing_seen_is_never_called_healthy() -> None:
    found = diagnose(_empty(0))
    assert found == [] and found.problems == (FAULT,)
    text = repr(found)
    assert text == f"nothing could be looked at: the recorder itself failed: {FAULT}"
    assert "nothing could be looked at" in found._repr_html_()
    assert found.to_json()["blind"] == f"the recorder itself failed: {FAULT}"
    assert repr(diagnose(_empty(0, troubles=()))) == (
        "nothing could be looked at: there is no parameter and no buffer in it"
    )


def test_the_recorders_faults_are_told_beside_what_it_saw() -> None:
    trace = engine_trace(guarded=True, ranks=2)
    trace[1].troubles.append(FAULT)
    found = diagnose(trace)
    assert not found.blind and found.problems == (f"{FAULT} (rank 1 of 2)",)
    assert repr(found).splitlines() == [
        "no residency hazard found (simulated accelerator)",
        f"the recorder itself failed: {FAULT} (rank 1 of 2)",
    ]


def test_ranks_that_saw_nothing_are_named_beside_those_that_did() -> None:
    whole = engine_trace(guarded=True)[0]
    found = diagnose(Trace({0: whole, 1: _empty(1, 2)}))
    assert not found.blind
    assert found.notes == (
        f"no tensor could be looked at on rank 1 of 2: the recorder itself failed: {FAULT}",
    )  # fmt: skip


def test_the_command_leaves_with_an_error_where_nothing_was_seen(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dk.record(nn.ReLU(), out=str(tmp_path / "a")):
        pass
    assert main(["diagnose", str(tmp_path / "a"), "--fail-on", "never"]) == 2
    assert "nothing could be looked at: there is no parameter and no buffer" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "a"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["blind"]
    with dk.record(nn.Linear(1, 1), out=str(tmp_path / "b")):
        pass
    assert main(["diagnose", str(tmp_path / "b")]) == 0
    assert "no residency hazard found" in capsys.readouterr().out


@pytest.mark.parametrize("root_holds_a_parameter", [False, True])
def test_evidence_quotes_the_policy_of_the_groups_that_own_the_parameters(root_holds_a_parameter: bool) -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="test", device="npu"))
    writer.table([Row(0, PARAMETER, "model", "layers.0.weight"), Row(1, PARAMETER, "model", "head.weight")])
    writer.table([Row(2, GROUP, "model", ""), Row(3, GROUP, "model", "layers.0"), Row(4, GROUP, "model", "head")])
    owner = GroupFacts(True, True, "CPUOffloadPolicy", device="npu", mesh="npu (2,)", mesh_device="npu", parameters=1)
    other = GroupFacts(False, False, "OffloadPolicy", device="npu", mesh="npu (4,)", mesh_device="npu", parameters=1)
    root = other if root_holds_a_parameter else GroupFacts(lazy_init="done")
    facts = [on("npu:0", True, "cpu"), on("npu:0"), root, owner, other]
    writer.moment(CALL, "x", 0, [Change(i, 1, writer.fact_id(one)) for i, one in enumerate(facts)], key=True)
    writer.close()
    from diagkit.trace.reader import read_rank

    finding, mixed = diagnose(read_rank(sink.lines))
    assert finding.code == "DK101" and finding.names == ("layers.0.weight",)
    assert mixed.code == "DK802a"
    assert [line for line in finding.evidence if line.startswith("policy")] == [
        "policy CPUOffloadPolicy(pin_memory=True), mesh npu (2,)"
    ]


def test_an_optimizer_that_trains_nothing_of_the_model_is_noted() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    idle = dk.inspect(model, torch.optim.AdamW(other.parameters()))
    assert idle.notes == (
        "none of the AdamW's 2 parameters belongs to this model: training does not reach it; "
        "build the optimizer after fully_shard",
    )
    assert "training does not reach it" in repr(idle)
    assert dk.inspect(model, torch.optim.AdamW(model.parameters())).notes == ()
    half = torch.optim.AdamW([model.weight, other.weight])
    assert dk.inspect(model, half).notes == ()


def test_an_exception_beside_a_model_that_nobody_could_look_at_is_explained_by_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diagkit.live._Found.snapshot", lambda self: _empty(0))
    text = "Attempted to set the storage of a tensor on device cpu to a storage on different device npu:0"
    found = dk.explain(RuntimeError(text))
    assert not found.certain and [rule.code for rule in found.candidates] == ["DK101", "DK102"]
    assert found.notes == (f"nothing could be looked at: the recorder itself failed: {FAULT}",)
    assert "not an FSDP2 residency problem" not in repr(found)
