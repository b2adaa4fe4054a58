"""The demo's cells against the field's measured outcomes, on two real ranks of the simulated accelerator.

The rows are written out here once more, as people read them, not taken from the demo's own table: two readers of one
source check each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from diagkit.demo import experiments
from diagkit.demo.expected import ROWS
from diagkit.demo.experiments import FLAGS, OPERATIONS, REVISIONS, Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIXED, ALONE = "cpu:gloo,npu:hccl", "hccl"
SPLIT = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:0"'
NO_BACKEND = "No backend type associated with device type cpu"
NOT_ON_CPU = "materialized on CPU"

Cells = dict[tuple[str, str, str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def document(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of everything: both engines, every revision, both kinds of process group, the control."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "diagkit", "demo", "--device", "sim", "--ranks", "2", "--history", "--control"]
    done = subprocess.run([*command, "--json", "--out", str(out)], capture_output=True, text=True, timeout=880)
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    found["code"] = done.returncode
    found["progress"] = done.stderr
    return found


@pytest.fixture(scope="module")
def cells(document: dict[str, Any]) -> Cells:
    return {(c["engine"], c["revision"], c["operation"], c["flags"], c["group"]): c for c in document["cells"]}


def told(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    if cell["outcome"] != "ok":
        return f"{cell['outcome']}: {cell['exception']['message']}"
    return "ok" if cell["exported"] is None else f"ok, tensors on {cell['exported']}"


# Engine, revisions, process groups, save, export, load: the table "what happened", first operation on a clean engine.
WHAT_HAPPENED = [
    ("fsdp", ["before"], [MIXED, ALONE], SPLIT, SPLIT, "ok"),
    ("fsdp", ["#6463"], [MIXED, ALONE], SPLIT, "ok, tensors on npu", "ok"),
    ("fsdp", ["#6604", "#7005", "#7103", "current"], [MIXED, ALONE], "ok", "ok, tensors on npu", "ok"),
    ("veomni", ["before", "#6463", "#6604", "#7005"], [MIXED, ALONE], SPLIT, SPLIT, "ok"),
    ("veomni", ["#7103"], [MIXED], "ok", "ok, tensors on cpu", "ok"),
    ("veomni", ["#7103"], [ALONE], "ok", NO_BACKEND, "ok"),
    ("veomni", ["current"], [MIXED, ALONE], "ok", "ok, tensors on npu", "ok"),
]
ROWS_OF_IT = [
    (engine, revision, group, operation, wanted)
    for engine, revisions, groups, *outcomes in WHAT_HAPPENED
    for revision in revisions
    for group in groups
    for operation, wanted in zip(("save", "export", "load"), outcomes, strict=True)
]


@pytest.mark.parametrize(("engine", "revision", "group", "operation", "wanted"), ROWS_OF_IT)
def test_a_clean_engine_under_the_policy_does_what_the_real_one_did(
    cells: Cells, engine: str, revision: str, group: str, operation: str, wanted: str
) -> None:
    cell = cells[engine, revision, operation, "policy", group]
    assert wanted in told(cell)
    assert (cell["outcome"] == "crash") == (wanted in (SPLIT, NO_BACKEND))
    if operation == "load":
        assert cell["values"] == "equal"


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("engine", ["fsdp", "veomni"])
def test_without_the_policy_everything_works_at_every_revision(cells: Cells, engine: str, revision: str) -> None:
    assert told(cells[engine, revision, "save", "manual", MIXED]) == "ok"
    assert told(cells[engine, revision, "load", "manual", MIXED]) == "ok"
    assert cells[engine, revision, "load", "manual", MIXED]["values"] == "equal"
    export = cells[engine, revision, "export", "manual", MIXED]
    assert told(export) == "ok, tensors on npu" and export["values"] == "equal"


def test_with_both_flags_veomni_splits_during_load_and_is_healed_by_the_offload_until_7103(cells: Cells) -> None:
    for revision in REVISIONS:
        cell = cells["veomni", revision, "load", "both", MIXED]
        at = cell["residency"]
        assert cell["outcome"] == "ok" and cell["values"] == "equal"
        assert at["rest"]["parameters"] == at["end"]["parameters"] == {"cpu/cpu pinned": 21}
        if revision in ("#7103", "current"):
            # The offload afterwards is still made, of what is on the CPU already.
            assert cell["moves"] == ["Module.cpu"] and at["end"] == at["rest"]
            assert "load" not in cell["splits_while"]
        else:
            assert cell["moves"] == ["Module.to", "Module.cpu"]
            assert at["after_move"]["parameters"] == {"npu:0/cpu pinned": 21}
            assert at["after_move"]["buffers"] == {"npu:0/npu:0": 1}
            assert at["end"]["buffers"] == {"cpu/cpu": 1}


def test_with_both_flags_the_fsdp_engine_obeys_the_policy_alone(cells: Cells) -> None:
    for revision in REVISIONS:
        assert told(cells["fsdp", revision, "load", "both", MIXED]) == "ok"
        assert told(cells["fsdp", revision, "train", "both", MIXED]) == "ok"


def test_with_both_flags_veomni_cannot_train_at_any_revision_and_a_retry_misleads(cells: Cells) -> None:
    for revision in REVISIONS:
        cell = cells["veomni", revision, "train", "both", MIXED]
        assert NOT_ON_CPU in told(cell)
        assert cell["retry"]["message"] == "'FSDPParam' object has no attribute 'param_dtype'"
        assert cell["first_cause"] == (
            "_Mode.__enter__ -> _Mode._to -> FSDPEngine.to -> FSDPEngine._load_model -> load_model_to_device"
            " -> Module.to -> FSDPParam.reset_sharded_param"
        )


def test_the_accelerators_backend_alone_stops_the_fsdp_engines_gradient_norm_but_not_veomnis(cells: Cells) -> None:
    for revision in REVISIONS:
        assert told(cells["fsdp", revision, "train", "policy", MIXED]) == "ok"
        assert NO_BACKEND in told(cells["fsdp", revision, "train", "policy", ALONE])
        assert told(cells["veomni", revision, "train", "policy", ALONE]) == "ok"


def test_the_manual_move_still_splits_at_every_revision(cells: Cells) -> None:
    for engine in ("fsdp", "veomni"):
        for revision in REVISIONS:
            cell = cells[engine, revision, "move", "policy", MIXED]
            assert SPLIT in told(cell)
            assert cell["residency"]["after_move"]["parameters"] == {"npu:0/cpu pinned": 21}


def test_at_rest_parameters_are_pinned_on_the_cpu_and_buffers_where_each_engine_leaves_them(cells: Cells) -> None:
    for (engine, _, _, flags, _), cell in cells.items():
        rest = cell["residency"]["rest"]
        if flags == "manual":
            assert rest == {"parameters": {"cpu/cpu": 21}, "buffers": {"cpu/cpu": 1}}
        else:
            assert rest["parameters"] == {"cpu/cpu pinned": 21}
            assert rest["buffers"] == ({"npu:0/npu:0": 1} if engine == "fsdp" else {"cpu/cpu": 1})


def test_a_guarded_operation_moves_nothing_and_changes_no_residency(cells: Cells) -> None:
    for operation in ("save", "load", "export"):
        for engine in ("fsdp", "veomni"):
            cell = cells[engine, "current", operation, "policy", MIXED]
            assert cell["moves"] == []
            assert cell["residency"]["end"] == cell["residency"]["rest"]


def test_the_momentary_split_inside_the_fsdp_engines_init_is_in_the_trace_and_no_finding(cells: Cells) -> None:
    for revision in REVISIONS:
        fsdp = cells["fsdp", revision, "load", "policy", MIXED]
        assert fsdp["splits_while"] == ["init"]
        assert cells["veomni", revision, "load", "policy", MIXED]["splits_while"] == []
        assert not {code for code in fsdp["findings"] if code.startswith(("DK1", "DK6"))}
    for revision in ("#6604", "#7005", "#7103", "current"):
        assert cells["fsdp", revision, "save", "policy", MIXED]["findings"] == []


def test_the_crash_is_diagnosed_and_its_cause_named(cells: Cells) -> None:
    cell = cells["fsdp", "before", "save", "policy", MIXED]
    assert "DK101" in cell["findings"]
    assert cell["first_cause"] == (
        "FSDPEngine.save_checkpoint -> FSDPEngine._load_model -> load_model_to_device"
        " -> Module.to -> FSDPParam.reset_sharded_param"
    )
    assert cell["residency"]["failure"]["parameters"] == {"npu:0/cpu pinned": 21}


def test_every_exported_tensor_equals_its_source_weight(cells: Cells) -> None:
    exports = [cell for key, cell in cells.items() if key[2] == "export" and cell["outcome"] == "ok"]
    assert len(exports) > 20
    assert {cell["values"] for cell in exports} == {"equal"}


def test_the_document_says_where_and_how_it_was_measured(document: dict[str, Any]) -> None:
    assert document["code"] == 0 and document["as_expected"] is True
    assert document["simulated"] is True and document["device"] == "npu" and document["ranks"] == 2
    assert "[1/" in document["progress"]
    pids = [pid for cell in document["cells"] for pid in cell["pids"]]
    assert all(len(cell["pids"]) == 2 for cell in document["cells"])
    assert len(set(pids)) == len(pids), "each cell has processes of its own"
    assert all(cell["simulated"] and cell["trace"] for cell in document["cells"])


def test_the_tables_speak_of_every_cell_exactly_once() -> None:
    for engine in experiments.ENGINES:
        for revision in REVISIONS:
            for operation in OPERATIONS:
                for flags in FLAGS:
                    for group in (MIXED, ALONE):
                        cell = Experiment(engine, revision, operation, flags, group)
                        assert sum(row.speaks_of(cell) for row in ROWS) == 1, cell.name
