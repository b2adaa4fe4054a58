"""Notebook 2 in a real JupyterLab in a real browser: run all, no error, figures there, nothing on the console.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import nbformat
import pytest
from conftest import CHROMIUM_ARGS
from playwright.sync_api import Browser, Page, expect, sync_playwright
from test_notebooks import NOTEBOOKS, SMALLER, read, with_parameters

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {
    # All cells are in the page at once, so that what is asserted does not depend on where it is scrolled to.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
QUIET = ["--LabApp.extension_manager=readonly", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
MINUTES = 60_000  # in milliseconds


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A JupyterLab of its own on copies of the notebooks: its address and token."""
    home = tmp_path_factory.mktemp("lab")
    (home / "notebooks").mkdir()
    for path in NOTEBOOKS:
        values = {**SMALLER.get(path.name[:2], {}), "trace": str(home / "traces" / path.name[:2])}
        nbformat.write(with_parameters(read(path), values), home / "notebooks" / path.name)
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
        *(f"--ServerApp.root_dir={home / 'notebooks'}", f"--LabApp.user_settings_dir={home / 'settings'}", *QUIET),
        f"--LabApp.workspaces_dir={home / 'workspaces'}",
    ]
    environment = {**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_CONFIG_DIR": str(home / "config")}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=home)
        try:
            wait_for(f"http://127.0.0.1:{port}/api?token={token}", home / "log")
            yield f"http://127.0.0.1:{port}", token
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_for(address: str, log: pathlib.Path) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not come up: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield running
        running.close()


@pytest.mark.parametrize("number", ["01", "02"])
def test_run_all_shows_the_figures_and_no_error(
    number: str, jupyterlab: tuple[str, str], browser: Browser, root: pathlib.Path
) -> None:
    address, token = jupyterlab
    notebook = next(path for path in NOTEBOOKS if path.name.startswith(number))
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    console, outside = watch(page, address)
    # A workspace of its own: another notebook's idle kernel in the status bar would be taken for this one's.
    page.goto(f"{address}/lab/workspaces/{number}/tree/{urllib.parse.quote(notebook.name)}?token={token}")
    expect(page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=2 * MINUTES)
    # Before its kernel is there, JupyterLab runs no cell and says nothing.
    expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible(timeout=2 * MINUTES)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    shots = root / "build" / "screenshots"
    shots.mkdir(parents=True, exist_ok=True)
    done = page.locator(".jp-OutputArea-output", has_text="All of it holds here:")
    errors = page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.error']")
    try:
        expect(done.or_(errors).first).to_be_attached(timeout=6 * MINUTES)
    finally:
        page.screenshot(path=shots / f"jupyterlab-{number}-end.png")
    figures = page.locator(".jp-Notebook figure.dk svg[role=img]")
    assert figures.count() >= 2
    assert errors.count() == 0
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        assert figures.nth(i).get_attribute("aria-label")
        box = figures.nth(i).bounding_box()
        assert box is not None and box["width"] > 600 and box["height"] > 200, "a figure fills the notebook's width"
        page.screenshot(path=shots / f"jupyterlab-{number}-figure-{i + 1}.png")
    page.close()
    assert not console, "JupyterLab's console is silent"
    assert not outside, "nothing is fetched from elsewhere"


def watch(page: Page, address: str) -> tuple[list[str], list[str]]:
    """What the page complains of, and what it asks of other machines; both grow while it lives."""
    console: list[str] = []
    outside: list[str] = []
    page.on("console", lambda message: console.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: console.append(str(error)))
    local = (address, address.replace("http", "ws", 1), "data:", "blob:")
    page.on("request", lambda request: outside.append(request.url) if not request.url.startswith(local) else None)
    return console, outside


def test_a_figure_saved_as_a_page_opens_from_disk_without_a_request(browser: Browser, tmp_path: pathlib.Path) -> None:
    from traces import engine_trace

    from diagkit.views import before_after

    figure = before_after(engine_trace(), engine_trace(guarded=True))
    file = tmp_path / "figure.html"
    file.write_text(figure.to_html(whole_page=True))
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    console, outside = watch(page, file.as_uri())
    page.goto(file.as_uri())
    assert page.get_by_role("img", name=figure.title).is_visible()
    page.get_by_text("The same in words").click()
    assert page.get_by_label("The figure in words").is_visible()
    assert page.locator("title", has_text="cpu pinned").count() > 10, "cells tell what they are when pointed at"
    page.close()
    assert not console and not outside
