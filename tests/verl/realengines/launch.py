"""Start the driver in verl's environment, from the tests' own, and read what its ranks reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realengines.cells import Cell

Reports = dict[Cell, list[dict[str, Any]]]
"""Every cell's reports, one a rank."""

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent


def variables(release_folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process in which one release of verl runs on the simulated npu."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(part) for part in (release_folder, HERE, ROOT)),
        "VERL_PLATFORM": "huawei",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def launch(
    python: Path,
    release_folder: Path,
    cells: Iterable[Cell],
    out: Path,
    *,
    environment: Mapping[str, str] | None = None,
    cold: bool = False,
    seconds: float = 1500.0,
) -> Reports:
    """Run cells of one release and return each cell's reports, one a rank.

    Raises RuntimeError with the end of the driver's log when the driver itself fails or takes longer than ``seconds``.
    """
    cells = list(cells)
    out.mkdir(parents=True, exist_ok=True)
    listing = out / f"cells-from-{cells[0].name}.json"
    listing.write_text(json.dumps([cell.as_dict() for cell in cells]))
    command = [str(python), "-m", "realengines.driver", "--cells", str(listing), "--out", str(out)]
    log = out / listing.with_suffix(".log").name
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--cold"] if cold else command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables(release_folder, environment or {}),
            start_new_session=True,
            cwd=out,
        )
        try:
            status: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"no end after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise RuntimeError(f"the driver ended with {status}:\n{log.read_text()[-3000:]}")
    return {cell: read_reports(cell, out) for cell in cells}


def read_reports(cell: Cell, out: Path) -> list[dict[str, Any]]:
    """Read the reports of one cell; a rank that left none stands there as died at its start."""
    reports = []
    for rank in range(cell.ranks):
        path = out / cell.name / f"rank-{rank}.json"
        missing = {"rank": rank, "stage": "start", "outcome": "died", "residency": {}}
        reports.append(json.loads(path.read_text()) if path.is_file() else missing)
    return reports
