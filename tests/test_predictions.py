"""Prediction against reality: every state and operation, really done on another model, in other processes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from traces import engine_trace

from diagkit.diagnosis.predictions import Facets, facets, measure, predict
from diagkit.diagnosis.predictions.lookup import ERRORS, OPERATIONS, Cell, Table, tables
from diagkit.errors import UsageError

HERE = pathlib.Path(__file__).resolve().parent
Reality = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tried(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("predictions") / "reality.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run([sys.executable, str(HERE / "prediction_ranks.py"), str(out)], env=env, check=True, timeout=1800)
    return dict(json.loads(out.read_text()))


def table_of(tried: dict[str, Any]) -> Table:
    version = str(tried["torch"]).partition("+")[0]
    if version not in tables():
        pytest.skip(f"torch version: {version} was not measured")
    return tables()[version]


def wrong_cells(reality: Reality, table: Table) -> list[str]:
    """Where the table and the world differ. "depends" allows what it names, and success."""
    wrong = []
    for entry in reality:
        prediction = predict(Facets(**entry["state"]), table=table)
        if prediction is None or not prediction.exact:
            wrong.append(f"{entry['name']}: no prediction for this very state")
            continue
        for operation, (outcome, error) in entry["operations"].items():
            cell = prediction[operation]
            same = (cell.outcome, cell.error) == (outcome, error)
            allowed = cell.outcome == "depends" and (outcome == "ok" or cell.error == error)
            if not (same or allowed):
                wrong.append(f"{entry['name']}, {operation}: predicted {cell}, found {outcome} {error}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_no_cell_is_wrong_on_another_model(tried: dict[str, Any]) -> None:
    reality = tried["reality"]
    assert len(reality) >= 30
    assert all(set(entry["operations"]) == set(OPERATIONS) for entry in reality)
    assert {
        "DK101",
        "DK102",
        "DK103a",
        "DK103b",
        "DK104",
        "DK301",
        "DK302",
        "DK402",
        "DK501",
        "DK601",
        "DK602",
        "DK604",
        "DK701",
        "DK802b",
        "DK105",
        "DK201",
        "DK202",
        "DK303",
    } <= {entry["code"] for entry in reality}
    assert wrong_cells(reality, table_of(tried)) == []


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_a_wrong_table_is_noticed_whichever_cell_is_wrong(tried: dict[str, Any]) -> None:
    table, chosen = table_of(tried), random.Random(7)
    measured = [Facets(**entry["state"]) for entry in tried["reality"]]
    for _ in range(40):
        state, operation = chosen.choice(measured), chosen.choice(OPERATIONS)
        cells = table.states[state]
        if cells[operation].outcome == "depends":
            continue
        lie = Cell("ok") if cells[operation].outcome != "ok" else Cell("crash", "set_storage")
        lying = dataclasses.replace(table, states={**table.states, state: {**cells, operation: lie}})
        assert any(operation in wrong for wrong in wrong_cells(tried["reality"], lying)), (state, operation)


# ---- looking up


def test_the_tables_that_ship_cover_the_versions_that_are_supported() -> None:
    assert {"2.13.0", "2.9.1"} <= set(tables())
    for table in tables().values():
        assert table.simulated
        for state, cells in table.states.items():
            assert set(cells) == set(OPERATIONS), state
            for cell in cells.values():
                assert cell.outcome in ("ok", "crash", "silent", "blocked", "depends")
                assert cell.text
                if cell.error and cell.outcome != "crash":
                    assert cell.error in ERRORS, cell


@pytest.mark.parametrize(
    ("version", "answers", "label"),
    [
        ("2.13.0", "2.13.0", ""),
        ("2.13.0+cpu", "2.13.0", ""),
        ("2.9.1+cu128", "2.9.1", ""),
        ("2.13.1", "2.13.0", "torch 2.13.1 was not measured; measured on 2.13.0"),
        ("2.11.0", "2.9.1", "torch 2.11.0 was not measured; measured on 2.9.1"),
        ("2.8.0", "2.9.1", "torch 2.8.0 was not measured; measured on 2.9.1"),
        ("3.0.0a0+git12ab", "2.13.0", "torch 3.0.0a0 was not measured; measured on 2.13.0"),
    ],
)
def test_an_unmeasured_torch_is_labelled(version: str, answers: str, label: str) -> None:
    found = predict(Facets(policy="pinned", parameters="split"), version)
    assert found is not None
    assert (found.torch, found.label) == (answers, label)


def test_an_unmeasured_state_is_labelled_or_has_no_prediction() -> None:
    near = predict(Facets(policy="pinned", parameters="split", lazy_init="done", gradients="home"), "2.13.0")
    assert near is not None and not near.exact and "this very state was not measured" in near.label
    mixed = predict(Facets(policy="mixed", parameters="split"), "2.13.0")
    assert mixed is not None and mixed["state_dict"].outcome == "crash" and "was not measured" in mixed.label
    assert predict(Facets(policy="no FSDP2"), "2.13.0") is None
    assert predict(Facets(policy="unpinned", parameters="hand split", backward="aborted"), "2.13.0") is None


def test_a_trace_speaks_the_words_of_the_tables() -> None:
    trace = engine_trace()[0]
    after_move = next(m for m in trace.moments if m.phase == 3 and m.cause is not None)
    state = facets(trace, after_move)
    assert (state.policy, state.parameters) == ("pinned", "split")
    assert facets(trace, trace.phases[1].exit or 0).parameters == "home"


def words(found: Mapping[str, Cell], operation: str) -> str:
    return found[operation].text


def test_a_prediction_reads_as_a_sentence() -> None:
    split = predict(Facets(policy="pinned", parameters="split"), "2.13.0")
    assert split is not None
    assert words(split, "state_dict").startswith("raises 'Attempted to set the storage")
    assert words(split, "backward") == (
        "is not reached: the pass before it raises 'FSDP parameters should be materialized on CPU'"
    )
    assert words(split, '.to("cpu")') == "works, and drags the buffers to the CPU (DK501)"
    healthy = predict(Facets(policy="pinned"), "2.13.0")
    assert (
        healthy is not None and words(healthy, ".to(device)") == "seems to work, and splits metadata from bytes (DK101)"
    )


@pytest.mark.slow
def test_a_state_is_probed_in_a_process_of_its_own(compiler: str) -> None:
    state = Facets(policy="pinned", parameters="split")
    found = measure(state)
    assert found.exact
    assert found["state_dict"].outcome == "crash"


def test_a_state_that_nobody_knows_cannot_be_probed() -> None:
    with pytest.raises(UsageError, match="no state like this one"):
        measure(Facets(policy="no FSDP2"))
