"""A trace as a table, value by value; and that all reading works where torch was never installed."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from trace_story import lines

from diagkit.trace import Trace, open_trace

pandas = pytest.importorskip("pandas")

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(lines(rank, 2)))
    return tmp_path


@pytest.fixture
def trace(folder: pathlib.Path) -> Trace:
    return open_trace(folder)


def test_a_line_per_change_says_what_and_when(trace: Trace) -> None:
    table = trace.frame()
    assert len(table) == 2 * (5 + 5 + 5)
    assert set(table["rank"]) == {0, 1}
    moved = table[(table["rank"] == 1) & (table.label == "Module.to")]
    assert list(moved.name) == [f"layers.{i}.weight" for i in range(5)]
    line = moved.iloc[3].to_dict()
    time = line.pop("time")
    assert abs(time - trace[1].moments[5].time) < 1e-6
    assert line == {
        "rank": 1, "moment": 5, "phase": 2, "phase_name": "save", "label": "Module.to", "model": "model",
        "kind": "parameter", "name": "layers.3.weight", "part": "",
        "metadata_device": "npu:0", "storage_device": "cpu", "pinned": True, "split": True, "aliased": True,
        "registered": None, "sharded_state": None, "dtype": "float32", "storage_dtype": "float32", "generation": 1,
        "cause": "engine.py:41 save_checkpoint: save_checkpoint -> Module.to",
    }  # fmt: skip


def test_a_line_per_moment_follows_every_tensor(trace: Trace) -> None:
    table = trace.frame(every=True)
    # eight moments; parameters are there in all, optimizer states from the third on
    assert len(table) == 2 * (8 * 5 + 6 * 5)
    one = table[(table["rank"] == 0) & (table.name == "layers.0.weight") & (table.kind == "parameter")]
    assert list(one.split) == [False] * 5 + [True] * 3
    assert list(one.generation) == [0] * 5 + [1] * 3
    assert list(one.phase_name) == ["", "train", "train", "train", "save", "save", "save", "save"]
    states = table[(table["rank"] == 0) & (table.kind == "optimizer_state")]
    assert set(states.part) == {"exp_avg"} and states.moment.min() == 2


def test_one_rank_has_the_doors_of_a_whole_run(trace: Trace) -> None:
    alone = trace[1]
    assert alone.frame().equals(trace.frame().query("rank == 1").reset_index(drop=True))
    assert alone.findings().codes == Trace({1: alone}).findings().codes != []


def test_a_table_of_a_damaged_trace_is_as_long_as_what_could_be_read(tmp_path: pathlib.Path) -> None:
    text = lines()
    (tmp_path / "rank-00000.jsonl").write_bytes(b"".join(text[:4]) + text[4][:30])
    table = open_trace(tmp_path).frame()
    assert list(table.label.unique()) == ["start"] and len(table) == 5


# ---- without torch: an environment of pandas and what pandas needs, and nothing else


def closure(names: list[str]) -> list[str]:
    """These distributions and all that they require."""
    found: list[str] = []
    while names:
        name = names.pop()
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.append(name)
        names += [re.split(r"[\s;<>=!~\[(]", need)[0] for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder for ``PYTHONPATH`` that holds links to pandas and its requirements."""
    folder = tmp_path_factory.mktemp("site")
    for name in closure(["pandas"]):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top.endswith((".dist-info", "..")) or (folder / top).exists():
                continue
            (folder / top).symlink_to(pathlib.Path(str(distribution(name).locate_file(top))).resolve())
    return folder


def bare(folder: pathlib.Path | None, code: str) -> str:
    """Output of the code in an interpreter without any site packages but those in the folder."""
    path = os.pathsep.join([str(ROOT), *([str(folder)] if folder else [])])
    check = "import importlib.util; assert importlib.util.find_spec('torch') is None\n"
    result = subprocess.run(
        [sys.executable, "-S", "-c", check + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": path, "PATH": os.environ["PATH"]},
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_reading_a_trace_needs_the_standard_library_alone(folder: pathlib.Path) -> None:
    said = bare(
        None,
        f"""
import json, sys
from diagkit import open_trace
trace = open_trace({str(folder)!r})
moved = [t for rank in trace for t in rank.transitions()]
print(json.dumps([repr(trace), str(moved[0].cause), len(moved[0].rows), sorted(sys.modules)]))
""",
    )
    text, cause, count, modules = json.loads(said)
    assert text == "<Trace story: 2 of 2 ranks, simulated npu, 10 rows, 16 moments, 2 failures>"
    assert (cause, count) == ("engine.py:41 save_checkpoint: save_checkpoint -> Module.to", 5)
    assert not {"torch", "numpy", "pandas"} & set(modules)


def test_tables_work_without_torch(folder: pathlib.Path, without_torch: pathlib.Path) -> None:
    code = f"from diagkit import open_trace; print(open_trace({str(folder)!r}).frame().split.sum())"
    assert bare(without_torch, code).strip() == "10"


def test_tables_without_pandas_say_what_to_install(folder: pathlib.Path) -> None:
    code = f"""
from diagkit import open_trace
from diagkit.errors import MissingDependency
try: open_trace({str(folder)!r}).frame()
except MissingDependency as error: print(error)
"""
    assert bare(None, code).strip() == "tables need pandas. pip install 'diagkit[report]'."


def test_help_works_without_torch(without_torch: pathlib.Path) -> None:
    said = bare(without_torch, "from diagkit.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert "usage: diagkit" in said


JOB = """
import contextlib, json, sys, tempfile
import torch
recorded = {recorded}
with tempfile.TemporaryDirectory() as folder:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if recorded:
        import diagkit as dk
    with dk.record(model, optimizer, out=folder) if recorded else contextlib.nullcontext() as rec:
        with rec.phase("train") if recorded else contextlib.nullcontext():
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        with rec.phase("save") if recorded else contextlib.nullcontext():
            model.state_dict()
            model.double()
print(json.dumps(sorted(sys.modules)))
"""


def test_recording_imports_nothing_that_a_job_does_not_have() -> None:
    def modules(recorded: bool) -> set[str]:
        command = [sys.executable, "-c", JOB.replace("{recorded}", str(recorded))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert result.returncode == 0, result.stderr
        return set(json.loads(result.stdout))

    new = modules(True) - modules(False)
    tops = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert tops <= {"diagkit", "torch"}
    assert {name for name in new if name.startswith("torch.")} <= {"torch.multiprocessing.reductions"}
    rooms = {name.split(".")[1] for name in new if name.startswith("diagkit.")}
    assert rooms == {"capture", "trace", "language", "errors", "torch_internals"}
