"""Runs verl's engines and the lab's once for all tests of this folder, and prints the comparison at the end."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

# The drivers' package is found by its folder, since a package named "tests.verl" would hide verl itself.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from realengines import environment
from realengines.cells import RELEASES, Cell, cells_of
from realengines.compare import DemoCell, Facts, differences, facts_of, facts_of_demo, table
from realengines.known import KNOWN
from realengines.launch import Reports, launch

_TABLE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every rank of every cell reported, verl's engines and the lab's, by cell."""
    environment.build()
    out = tmp_path_factory.mktemp("real-engines")
    found: Reports = {}
    for release in RELEASES:
        real = cells_of(release)
        found |= launch(environment.PYTHON, environment.release_folder(release), real, out)
        found |= launch(environment.PYTHON, environment.release_folder(release), [c.counterpart for c in real], out)
    return found


@pytest.fixture(scope="session")
def facts(reports: Reports) -> dict[Cell, Facts]:
    """The comparable words of every cell."""
    return {cell: facts_of(ranks) for cell, ranks in reports.items()}


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[DemoCell, Facts]:
    """What ``diagkit demo`` says of the lab's engines, at the revisions that verl's releases stand for."""
    revisions = [word for revision in RELEASES.values() for word in ("--revision", revision)]
    command = [sys.executable, "-m", "diagkit", "demo", "--ranks", "2", "--device", "sim", "--control", "--json"]
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run([*command, *revisions, "--out", str(out)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    entries = json.loads(done.stdout)["cells"]
    return {
        (entry["engine"], entry["revision"], entry["operation"], entry["flags"], entry["group"]): facts_of_demo(entry)
        for entry in entries
    }


@pytest.fixture(scope="session")
def comparison(request: pytest.FixtureRequest, facts: dict[Cell, Facts]) -> Iterator[None]:
    """Leave the comparison table for the end of the run."""
    cells = [cell for release in RELEASES for cell in cells_of(release)]
    rows = [(cell, facts[cell], facts[cell.counterpart]) for cell in cells]
    request.config.stash[_TABLE] = table(
        (cell, real, lab, differences(cell, real, lab, KNOWN)) for cell, real, lab in rows
    )
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if text := config.stash.get(_TABLE, ""):
        terminalreporter.section("verl's engines and the lab's, on the simulated accelerator")
        terminalreporter.write_line(text)
