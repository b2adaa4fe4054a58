"""`pytest -m accelerator`: the demo's matrix, parity and the hazards on a real CUDA or NPU device; one device suffices.

The same script runs on the simulated accelerator in the ordinary suite, so that it holds when a device is at hand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from diagkit.trace import open_trace

ROOT = pathlib.Path(__file__).resolve().parent.parent
WHERE = ["sim", pytest.param("real", marks=pytest.mark.accelerator)]
SET_STORAGE = "Attempted to set the storage of a tensor"
# Name -> code that must be among those found, the exception's text.
HAZARDS = {
    "split": ("DK101", SET_STORAGE if torch.__version__ >= "2.9" else ""),
    "unpinned": ("DK103a", "materialized on CPU"),
    "stranded": ("DK301", "same device"),
    "buffer left": ("DK501", "same device"),
}


def real_device() -> str | None:
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if importlib.util.find_spec("torch_npu") is not None else None


def run(*words: str, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module", params=WHERE)
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "real" and real_device() is None:
        pytest.skip("accelerator: no CUDA or NPU device here")
    if request.param == "sim":
        if real_device() == "npu":
            pytest.skip("accelerator: nothing is simulated beside torch_npu")
        request.getfixturevalue("compiler")
    return str(request.param)


@pytest.fixture(scope="module")
def answer(where: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = os.environ.get("ACCELERATOR_TRACE") if where == "real" else None
    trace = pathlib.Path(kept) if kept else tmp_path_factory.mktemp("accelerator")
    done = run(str(ROOT / "tests" / "accelerator_job.py"), where, str(trace))
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "trace": trace}


def test_training_is_the_same_on_the_device_with_and_without_offload(answer: dict[str, Any]) -> None:
    losses = answer["parity"]
    assert len(losses["cpu"]) == 8
    assert losses["cpu"][-1] < losses["cpu"][0]
    for name, found in losses.items():
        assert found == pytest.approx(losses["cpu"], rel=1e-3), name


def test_what_is_healthy_is_not_blamed(answer: dict[str, Any]) -> None:
    assert answer["hazards"]["healthy"] == {"found": [], "after": [], "error": ""}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_each_hazard_happens_is_found_and_is_cured(hazard: str, answer: dict[str, Any]) -> None:
    code, text = HAZARDS[hazard]
    told = answer["hazards"][hazard]
    assert code in told["found"]
    assert text in told["error"]
    assert bool(told["error"]) == bool(text)
    assert told["after"] == []


def test_the_crash_leaves_a_trace_that_names_its_line(answer: dict[str, Any]) -> None:
    trace = open_trace(answer["trace"])
    (finding,) = trace.findings()
    assert (finding.code, finding.phase) == ("DK101", "save")
    assert finding.cause.frame.code == "bench.model.to(mesh.device_type)"
    assert trace.simulated == (answer["name"] == "simulated")


@pytest.mark.accelerator
def test_the_demos_matrix_is_as_predicted_on_the_device(tmp_path: pathlib.Path) -> None:
    device = real_device()
    if device is None:
        pytest.skip("accelerator: no CUDA or NPU device here")
    ranks = "2" if device == "cuda" and torch.cuda.device_count() > 1 else "1"
    words = ("-m", "diagkit", "demo", "--device", device, "--ranks", ranks, "--json", "--out", str(tmp_path))
    done = run(*words, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not any(cell["simulated"] for cell in json.loads(done.stdout)["cells"])
