"""What all tests share: what this machine offers, and the rule that CI skips nothing by accident.

Locally a test whose compiler or browser is missing is skipped with a reason. With ``CI=true`` every skip is a failure,
save for what CI cannot have: a real accelerator, and behaviour that another torch version has.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = pathlib.Path(__file__).resolve().parent.parent
IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

# A skip whose reason begins with one of these is meant, in CI too.
MEANT = ("accelerator:", "torch version:")

# Tests start ranks beside each other on few cores; a thread pool in each of them would only fight the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    _no_skip_by_accident((yield).get_result())  # type: ignore[misc]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    _no_skip_by_accident((yield).get_result())  # type: ignore[misc]


def _no_skip_by_accident(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (IN_CI and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(MEANT):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped in CI, where nothing may be missing: {reason}"


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C++ compiler that builds the simulated accelerator; a test that starts the simulator asks for it."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no C++ compiler here (Debian or Ubuntu: apt-get install g++ python3-dev)")
    return found


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium for Playwright (``executable_path``); start it with :data:`CHROMIUM_ARGS`."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here (Debian or Ubuntu: apt-get install chromium fonts-dejavu-core)")


# No sandbox, because tests run as root in containers; and nothing that calls out of the machine by itself.
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A headless Chromium; `pages` says what its pages complain of. One a module: Playwright's loop bars asyncio's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield running
        running.close()
