"""Wrong arguments where people put them: one clear line and no traceback; and a path where a trace would do."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from torch import nn

import diagkit as dk
from diagkit.cli import main
from diagkit.errors import DiagkitError, TraceError, UsageError
from diagkit.views import before_after, outcome_matrix, residency_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("misuse") / "run"
    model = nn.Linear(2, 2)
    with dk.record(model, out=str(out)) as recorder, recorder.phase("train"):
        model.double()
    return out


@pytest.mark.parametrize("path", [None, 5, b"runs/a", ["runs/a"], nn.Linear(1, 1)])
def test_what_is_no_path_opens_no_trace(path: Any) -> None:
    with pytest.raises(UsageError, match=f"no path of a trace: found {type(path).__name__}"):
        dk.open_trace(path)


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "no\0where", "nowhere"])
def test_a_path_that_cannot_be_is_told_in_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError):
        dk.open_trace(path)
    assert main(["diagnose", path]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 400


def test_views_open_a_path_and_take_an_inspection(folder: pathlib.Path) -> None:
    text = residency_map(dk.open_trace(folder)).to_text()
    assert residency_map(folder).to_text() == text == residency_map(str(folder)).to_text()
    assert before_after(folder, str(folder)).to_text() == before_after(dk.open_trace(folder), folder).to_text()
    assert "weight" in residency_map(dk.inspect(nn.Linear(1, 1))).to_text()  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [None, 5, nn.Linear(1, 1), []])
def test_views_refuse_what_is_no_trace(thing: Any, folder: pathlib.Path) -> None:
    for draw in (
        lambda: residency_map(thing),
        lambda: before_after(folder, thing),
        lambda: before_after(thing, folder),
    ):
        with pytest.raises(UsageError, match=f"no trace to draw: found {type(thing).__name__}"):
            draw()
    with pytest.raises(TraceError, match="no such file or folder"):
        before_after(folder, "x")


@pytest.mark.parametrize("cells", [None, 5, [1], "runs/a", {"engine": 1}])
def test_an_outcome_matrix_needs_cells(cells: Any, folder: pathlib.Path) -> None:
    for given in (cells, dk.open_trace(folder)):
        with pytest.raises(UsageError, match="no cells of an outcome matrix"):
            outcome_matrix(given)


@pytest.mark.parametrize("ranks", ["3-1", "0,5-2", "2-"])
def test_ranks_that_make_no_sense_are_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", ranks, "train.py"]) == 2
    assert f"--ranks makes no sense: found {ranks}, expected ranks such as 0-3,7" in capsys.readouterr().err


def test_messages_show_paths_as_they_are_written() -> None:
    error = DiagkitError("no", found=pathlib.Path("a/b"), where=pathlib.Path("/c d"))
    assert str(error) == "no: found a/b (at /c d)"
