"""Notebook 2 in a real JupyterLab in a real browser: run all, no error, figures there, nothing on the console.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import nbformat
import pytest
from notebook_server import MINUTES, NotebookServer, errors, run_all, serve
from pages import barriers, watch
from playwright.sync_api import Browser, expect
from test_notebooks import NOTEBOOKS, SMALLER, read, with_parameters

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookServer]:
    """A JupyterLab of its own on copies of the notebooks."""
    home = tmp_path_factory.mktemp("lab")
    (home / "notebooks").mkdir()
    for path in NOTEBOOKS:
        values = {**SMALLER.get(path.name[:2], {}), "trace": str(home / "traces" / path.name[:2])}
        nbformat.write(with_parameters(read(path), values), home / "notebooks" / path.name)
    with serve(home) as server:
        yield server


@pytest.mark.parametrize("number", ["01", "02", "04"])
def test_run_all_shows_the_figures_and_no_error(
    number: str, jupyterlab: NotebookServer, browser: Browser, root: pathlib.Path
) -> None:
    notebook = next(path for path in NOTEBOOKS if path.name.startswith(number))
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    console, outside = watch(page, jupyterlab.address)
    run_all(page, jupyterlab, notebook.name)
    shots = root / "build" / "screenshots"
    shots.mkdir(parents=True, exist_ok=True)
    done = page.locator(".jp-OutputArea-output", has_text="All of it holds here:")
    try:
        expect(done.or_(errors(page)).first).to_be_attached(timeout=6 * MINUTES)
    finally:
        page.screenshot(path=shots / f"jupyterlab-{number}-end.png")
    figures = page.locator(".jp-Notebook figure.dk svg[role=img]")
    assert figures.count() >= 2
    assert errors(page).count() == 0
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        assert figures.nth(i).get_attribute("aria-label")
        box = figures.nth(i).bounding_box()
        assert box is not None and box["width"] > 600 and box["height"] > 120, "a figure fills the notebook's width"
        page.screenshot(path=shots / f"jupyterlab-{number}-figure-{i + 1}.png")
    page.close()
    assert not console, "JupyterLab's console is silent"
    assert not outside, "nothing is fetched from elsewhere"


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
    assert not barriers(page)
    page.close()
    assert not console and not outside
