"""Every notebook runs from top to bottom by itself, asserts what it claims, and is kept in git without outputs."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9] *.ipynb"))

#: What a notebook's `parameters` cell is given here, so that it takes at most 25 s.
SMALLER: dict[str, dict[str, Any]] = {
    "01": {"layers": 1},
    "02": {"ranks": 1, "engines": ("veomni",), "revisions": ("before", "#7103")},
    "03": {"revisions": ("#7103", "current")},
    "04": {"ranks": 1},
    "05": {"kernels": 1, "engines": ("fsdp",)},
    "06": {"blocks": 2},
    "07": {"data": str(FOLDER.parent / "data")},
}
#: How the first cell begins to say what its reader will be able to do, in each language.
PROMISES = ("you can\n", "你能够\n")
#: A notebook in another language -> the one that it was translated from.
TRANSLATIONS = {"02 崩溃与守卫": "02 The crash and the guard"}
#: Characters of a printed line: JupyterLab breaks a wider one at the page's edge, inside a word.
WIDTH = 110


@pytest.fixture(scope="session")
def simulator(compiler: str) -> None:
    """The simulated accelerator, compiled before the first notebook's time is taken."""
    from diagkit.lab.simdevice import build

    build.built(announce=False)


def read(path: pathlib.Path) -> Any:
    return nbformat.read(path, as_version=4)


def with_parameters(notebook: Any, values: dict[str, Any]) -> Any:
    """The notebook with a cell after its `parameters` cell that sets these values."""
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    for name in values:
        assert re.search(rf"\b{name}\b.*=", notebook.cells[at].source), f"the parameters cell does not set {name}"
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    return notebook


def run(notebook: Any, folder: pathlib.Path) -> None:
    """Runs it in a kernel of its own; what that takes is measured in benchmarks/notebooks.py."""
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_claims_hold(path: pathlib.Path, tmp_path: pathlib.Path, simulator: None) -> None:
    notebook = with_parameters(read(path), {**SMALLER.get(path.name[:2], {}), "trace": str(tmp_path / "traces")})
    run(notebook, tmp_path)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = "".join(output.get("text", "") + str(output.get("data", "")) for output in outputs)
    assert shown.count("<svg") >= 2, "the figures are there"
    assert torch.accelerator.is_available() or "SIMULATED" in shown, "who reads the outputs must know"
    lines = [line for output in outputs for line in printed(output).replace(str(tmp_path), "").splitlines()]
    assert not [line for line in lines if len(line) > WIDTH and "site-packages" not in line]  # those are torch's own


def printed(output: Any) -> str:
    """What a reader sees of it as plain text: nothing of what has a page or a widget beside."""
    data = output.get("data", {})
    return str(output.get("text") or (data["text/plain"] if set(data) == {"text/plain"} else ""))


@pytest.mark.slow
def test_the_claims_can_fail(tmp_path: pathlib.Path, simulator: None) -> None:
    """A notebook whose claims held whatever happened would prove nothing: without pinning nothing may split."""
    notebook = with_parameters(read(NOTEBOOKS[0]), {"layers": 1, "pin_memory": False, "trace": str(tmp_path)})
    claims = notebook.cells[-2]
    claims.source = claims.source.replace("if pin_memory:", "if True:")
    with pytest.raises(Exception, match="AssertionError"):
        run(notebook, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_agreed_shape(path: pathlib.Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    number = int(path.name[:2])
    first = notebook.cells[0].source
    assert first.startswith(f"# {number} · "), "the title begins with the notebook's number"
    assert any(promise in first for promise in PROMISES), "the first cell says what you will be able to do"
    assert path.stem[3:] == first.splitlines()[0].split(" · ")[1].rstrip("?"), "the file is called as its title says"
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    last = [cell.source for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.count("assert ") >= 5, "the last cell of code asserts what the notebook claims"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: pathlib.Path) -> None:
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert set(notebook.metadata) == {"kernelspec", "language_info"}, "no machine's own metadata"
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", path.read_text())


def test_no_two_notebooks_have_one_number() -> None:
    numbers = [path.name[:2] for path in NOTEBOOKS if path.stem not in TRANSLATIONS]
    assert len(set(numbers)) == len(numbers)


def test_the_index_lists_every_notebook_by_its_title_and_in_order() -> None:
    listed = re.findall(r"\| \[(.+?)\]\(<(.+?)>\) \|", (FOLDER / "README.md").read_text())
    titles = [read(path).cells[0].source.splitlines()[0].removeprefix("# ") for path in NOTEBOOKS]
    assert listed == list(zip(titles, (path.name for path in NOTEBOOKS), strict=True))


@pytest.mark.parametrize("translation", TRANSLATIONS)
def test_a_translation_has_the_same_cells_and_claims_the_same(translation: str) -> None:
    ours, original = (read(FOLDER / f"{name}.ipynb").cells for name in (translation, TRANSLATIONS[translation]))
    assert [(cell.cell_type, cell.id) for cell in ours] == [(cell.cell_type, cell.id) for cell in original]
    assert claims(ours) == claims(original) and claims(ours)


def claims(cells: Any) -> list[str]:
    """Every assertion of a notebook, without its comments."""
    code = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    return [ast.unparse(node) for node in ast.walk(code) if isinstance(node, ast.Assert)]
