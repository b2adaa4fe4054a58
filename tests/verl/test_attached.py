"""diagkit attached to verl's own engines by environment variables alone: the crash is explained, what works stays
silent.

Nothing in the job names diagkit: verl imports the modules of ``VERL_USE_EXTERNAL_MODULES``, and ``DIAGKIT_TRACE``
says where to record.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
from typing import Any, NamedTuple

import pytest
from realengines import environment
from realengines.cells import Cell
from realengines.launch import launch, variables

import diagkit

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

CRASHES = Cell("0.8.0", "fsdp", "policy", "save", 2)
WORKS = [
    Cell("0.8.0", "fsdp", "policy", "export", 2),
    Cell("0.9.1", "fsdp", "policy", "save", 2),
    Cell("0.9.1", "fsdp", "policy", "export", 2),
    Cell("0.9.1", "fsdp", "policy", "train", 2),
]
VERLS_LINE = ("verl/utils/fsdp_utils.py", "load_fsdp2_model_to_gpu", "model.to(device)")


class Job(NamedTuple):
    reports: list[dict[str, Any]]
    logs: list[str]
    trace: Any


def switched_on(out: pathlib.Path) -> dict[str, str]:
    return {"DIAGKIT_TRACE": str(out / "trace"), "VERL_USE_EXTERNAL_MODULES": "diagkit.auto"}


def recorded(out: pathlib.Path) -> Any:
    """The one run that the job left."""
    (run,) = (out / "trace").iterdir()
    return diagkit.open_trace(run)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Job]:
    """Every cell as a job of its own, each rank started afresh."""
    environment.build()
    found = {}
    for cell in (CRASHES, *WORKS):
        out = tmp_path_factory.mktemp(cell.operation)
        folder = environment.release_folder(cell.release)
        reports = launch(environment.PYTHON, folder, [cell], out, environment=switched_on(out), cold=True)[cell]
        logs = [(out / cell.name / f"rank-{rank}.log").read_text() for rank in range(cell.ranks)]
        found[cell] = Job(reports, logs, recorded(out))
    return found


def assert_names_verls_line(trace: Any) -> None:
    file, function, text = VERLS_LINE
    (finding,) = trace.findings()
    assert finding.code == "DK101"
    frame = finding.cause.frame
    assert (frame.file.endswith(file), frame.function, frame.code) == (True, function, text)
    assert "FSDPEngine.save_checkpoint" in finding.cause.chain
    assert set(finding.ranks) == {0, 1}


def test_the_crash_of_the_save_is_explained_by_verls_own_line(jobs: dict[Cell, Job]) -> None:
    job = jobs[CRASHES]
    assert [report["exception"]["type"] for report in job.reports] == ["RuntimeError"] * 2
    assert_names_verls_line(job.trace)


def test_one_rank_explains_in_full_and_the_other_in_a_line(jobs: dict[Cell, Job]) -> None:
    told = [re.findall(r"^diagkit: rank \d: DK101 .*", log, re.MULTILINE) for log in jobs[CRASHES].logs]
    remedies = ["  remedy: " in log for log in jobs[CRASHES].logs]
    assert [len(lines) for lines in told] == [1, 1]
    assert sorted(remedies) == [False, True]
    assert all("diagkit: trace: " in log and "(simulated accelerator)" in log for log in jobs[CRASHES].logs)


@pytest.mark.parametrize("cell", WORKS, ids=lambda cell: cell.name)
def test_what_works_works_recorded_and_nothing_is_found(cell: Cell, jobs: dict[Cell, Job]) -> None:
    job = jobs[cell]
    assert [report["outcome"] for report in job.reports] == ["ok", "ok"]
    assert all(report.get("values_equal", True) for report in job.reports)
    assert sorted(job.trace.ranks) == [0, 1]
    assert job.trace.findings() == []


def test_two_ray_actors_leave_one_trace_that_names_the_line(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = [str(environment.PYTHON), "-m", "realengines.ray_ranks", "--out", str(out)]
    command += ["--cell", json.dumps(CRASHES.as_dict()), "--env", json.dumps(switched_on(out))]
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environ = variables(environment.release_folder(CRASHES.release), ray)
    for name in ("DIAGKIT_TRACE", "VERL_USE_EXTERNAL_MODULES"):
        assert name not in environ, "only the actors may be told"
    job = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=out, timeout=600)
    assert job.stdout.splitlines() == ["rank 0: RuntimeError", "rank 1: RuntimeError"], job.stderr[-2000:]
    trace = recorded(out)
    assert sorted(trace.ranks) == [0, 1]
    assert_names_verls_line(trace)
