"""A JupyterLab of its own for tests, and what a test does in it: open a notebook, run all of it, wait.

Nothing of the user's settings, workspaces or extensions takes part, and it asks nothing of other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from playwright.sync_api import Locator, Page, expect

SETTINGS = {
    # All cells are in the page at once, so that what is asserted does not depend on where it is scrolled to.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
QUIET = ["--LabApp.extension_manager=readonly", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
MINUTES = 60_000  # in milliseconds


class NotebookServer(NamedTuple):
    """Where it answers, and the folder whose notebooks it shows."""

    address: str
    token: str
    folder: pathlib.Path


@contextlib.contextmanager
def serve(home: pathlib.Path) -> Iterator[NotebookServer]:
    """A JupyterLab on the notebooks in ``home/notebooks``; its settings, workspaces and log stay in ``home``."""
    folder = home / "notebooks"
    folder.mkdir(exist_ok=True)
    for name, settings in SETTINGS.items():
        file = home / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *(f"--ServerApp.root_dir={folder}", f"--LabApp.user_settings_dir={home / 'settings'}", *QUIET),
        f"--LabApp.workspaces_dir={home / 'workspaces'}",
    ]
    environment = {**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_CONFIG_DIR": str(home / "config")}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=home)
        try:
            _wait_for(f"http://127.0.0.1:{port}/api?token={token}", home / "log")
            yield NotebookServer(f"http://127.0.0.1:{port}", token, folder)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_for(address: str, log: pathlib.Path) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not come up: {log.read_text()[-2000:]}")


def run_all(page: Page, server: NotebookServer, notebook: str) -> None:
    """Open a notebook of the server's folder in a workspace of its own and have all its cells run."""
    # A workspace of its own: another notebook's idle kernel in the status bar would be taken for this one's.
    workspace = urllib.parse.quote(notebook.partition(" ")[0].removesuffix(".ipynb"))
    tree = f"{server.address}/lab/workspaces/{workspace}/tree/{urllib.parse.quote(notebook)}"
    page.goto(f"{tree}?token={server.token}")
    expect(page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=2 * MINUTES)
    expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible(timeout=2 * MINUTES)
    begun = page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[[*\d]+\]:")).first
    for _ in range(6):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        try:
            expect(begun).to_be_attached(timeout=10_000)
            return
        except AssertionError:  # before it is connected to its kernel, JupyterLab runs no cell and says nothing
            continue
    pytest.fail(f"JupyterLab runs no cell of {notebook}")


def errors(page: Page) -> Locator:
    """The outputs of cells that raised."""
    return page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.error']")
