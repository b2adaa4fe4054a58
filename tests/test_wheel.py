"""The wheel for nodes without a network: it brings diagkit, changes nothing else, and records with the torch it finds.

``WHEEL_PYTHON=/path/to/python`` runs the last tests in another environment, with a torch and a numpy of its own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

from diagkit import torch_internals
from diagkit.trace import open_trace

ROOT = pathlib.Path(__file__).resolve().parent.parent
OTHER = os.environ.get("WHEEL_PYTHON", sys.executable)
JOB = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.load_state_dict(model.state_dict())
"""


def ran(*command: object, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=250,
        cwd="/",
        env={**environment, "PIP_NO_INDEX": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("dist")
    # A copy: building leaves a folder beside the sources.
    source = tmp_path_factory.mktemp("source")
    names = ["diagkit", "pyproject.toml", "README.md", "LICENSE"]
    ran("cp", "-r", *(ROOT / name for name in names), source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    ran(*pip, "--wheel-dir", folder, source)
    (built,) = folder.glob("diagkit-*-py3-none-any.whl")
    return built


def test_the_wheel_needs_nothing_and_holds_everything(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = [file.read(name).decode() for name in names if name.endswith("METADATA")]
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert needs
    assert all("extra ==" in line for line in needs)
    tracked = ran("git", "-C", ROOT, "ls-files", "diagkit").split()
    assert set(tracked) <= names
    assert not [name for name in names if not name.startswith("diagkit")]


@pytest.fixture(scope="module")
def bare(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of an environment in which nothing but the wheel is installed."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place)
    python = place / "bin" / "python"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel)
    return python


def test_it_installs_without_an_index_and_brings_nothing_along(bare: pathlib.Path) -> None:
    assert ran(sys.executable, "-m", "pip", "--python", bare, "freeze").strip().startswith("diagkit @ file://")
    assert ran(bare.parent / "diagkit", "--version").startswith("diagkit ")


def test_without_torch_it_runs_scripts_and_reads_traces(bare: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "job.py").write_text("print('no torch here')")
    assert ran(bare, "-m", "diagkit", "run", tmp_path / "job.py") == "no torch here\n"
    assert ran(bare, "-c", "import diagkit.trace, diagkit.diagnosis; print('reads')") == "reads\n"


@pytest.fixture(scope="module")
def beside(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the wheel's content, to go before the packages of an environment that has a torch."""
    place = tmp_path_factory.mktemp("beside")
    ran(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel)
    return place


VERSIONS = "import torch, numpy; print(torch.__version__, torch.__file__, numpy.__version__, numpy.__file__)"


def test_it_records_with_the_torch_and_the_numpy_that_are_there(beside: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = ran(OTHER, "-c", VERSIONS)
    (tmp_path / "job.py").write_text(JOB)
    ran(OTHER, "-m", "diagkit", "run", "--out", tmp_path / "runs", tmp_path / "job.py", PYTHONPATH=str(beside))
    assert ran(OTHER, "-c", VERSIONS, PYTHONPATH=str(beside)) == before
    trace = open_trace(tmp_path / "runs")[0]
    assert before.startswith(trace.header.torch)
    assert tuple(map(int, trace.header.torch.split(".")[:2])) >= torch_internals.CAPTURE_FLOOR
    labels = [moment.label for moment in trace.moments]
    assert {"model found", "first forward", "Optimizer.step", "Module.state_dict", "Module.load_state_dict"} <= set(
        labels
    )
    assert trace.troubles == []
    assert trace.problems == []
    parameters = [trace.facts[trace.state(-1).facts[row.id]] for row in trace.rows if row.kind == "parameter"]
    assert [(one.short(), one.aliased, one.registered, one.unreadable) for one in parameters] == [  # type: ignore[union-attr]
        ("cpu/cpu", True, True, None)
    ] * 2
