"""The what-if laboratory in a real JupyterLab in a real browser: a run, its progress and a cancelled one change what is
displayed, and rightly.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import nbformat
import pytest
from notebook_server import MINUTES, NotebookServer, errors, run_all, serve
from pages import watch
from playwright.sync_api import Browser, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

CELLS = [
    "from diagkit.demo.scenario import Scenario\n"
    "from diagkit.views import whatif\n"
    'short = whatif(Scenario("fsdp", "before", ("train", "save")), ranks=1, device="sim", out="short")\n'
    "short",
    'long = whatif(Scenario("fsdp", "current", ("train", "save") * 60), ranks=1, device="sim", out="long")\nlong',
    'print("All of it holds here:", short, long)',
]


@pytest.fixture(scope="module")
def jupyterlab(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookServer]:
    home = tmp_path_factory.mktemp("whatif-lab")
    (home / "notebooks").mkdir()
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), home / "notebooks" / "what-if.ipynb")
    with serve(home) as server:
        yield server


@pytest.fixture(scope="module")
def page(jupyterlab: NotebookServer, browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    console, outside = watch(page, jupyterlab.address)
    run_all(page, jupyterlab, "what-if.ipynb")
    started = page.locator(".jp-OutputArea-output", has_text="All of it holds here:")
    expect(started.or_(errors(page)).first).to_be_attached(timeout=2 * MINUTES)
    yield page
    assert errors(page).count() == 0
    page.close()
    assert not console, "JupyterLab's console is silent"
    assert not outside, "nothing is fetched from elsewhere"


class Panel:
    """One laboratory on the page: what a user can see and press."""

    def __init__(self, page: Page, cell: int) -> None:
        # The widgets alone: beside them, unseen, is what a page without a kernel shows.
        self.box = page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jupyter-widgets").first
        self.steps = self.box.locator(".dkt .steps")
        self.figures = self.box.locator("figure.dk svg[role=img]")
        self.run, self.cancel, self.train = (
            # By text: the icon's glyph is a part of a button's accessible name.
            self.box.locator("button.widget-button", has_text=name)
            for name in ("Run", "Cancel", "train")
        )
        expect(self.cancel).to_be_disabled(timeout=MINUTES)

    def choose(self, label: str, value: str) -> None:
        self.box.get_by_label(label).select_option(label=value)

    def says(self, text: str | re.Pattern[str]) -> None:
        expect(self.box.get_by_text(text, exact=True)).to_be_visible(timeout=2 * MINUTES)


def test_a_bet_and_a_run_change_what_is_displayed_and_rightly(page: Page, root: pathlib.Path) -> None:
    shots = root / "build" / "screenshots"
    shots.mkdir(parents=True, exist_ok=True)
    panel = Panel(page, 0)
    expect(panel.steps).to_contain_text("Attempted to set the storage")  # foretold before anything runs
    page.screenshot(path=shots / "whatif-1-forecast.png")

    panel.choose("My bet:", "nothing fails")
    panel.run.click()
    expect(panel.cancel).to_be_enabled()
    expect(panel.run).to_be_disabled()
    expect(panel.figures).to_have_count(2, timeout=2 * MINUTES)
    verdict = "save fails first, as foretold. Your bet, that nothing fails, is lost."
    panel.says(f"run 1: {verdict}")
    expect(panel.steps).to_contain_text("RuntimeError: Attempted to set the storage")
    expect(panel.figures.first).to_have_attribute("aria-label", f"Run 1: {verdict}")
    split = "In save, Module.to splits all 21 parameters: metadata says npu:0, the bytes are on cpu"
    expect(panel.figures.nth(1)).to_have_attribute("aria-label", split)
    page.screenshot(path=shots / "whatif-2-run.png")

    # One thing changed: another forecast, another outcome, a second row.
    panel.choose("revision", "#6604")
    expect(panel.steps).not_to_contain_text("Attempted to set the storage")
    panel.train.click()
    expect(panel.steps).to_contain_text("train 2")
    panel.run.click()
    panel.says("run 2: Nothing fails, as foretold.")
    for row in ("run 1: before", "run 2: #6604"):
        expect(panel.figures.first.locator("text", has_text=row).first).to_be_visible()
    panel.figures.first.scroll_into_view_if_needed()
    page.screenshot(path=shots / "whatif-3-second-run.png")


def test_a_run_shows_how_far_it_is_and_ends_when_it_is_told_to(page: Page, root: pathlib.Path) -> None:
    shots = root / "build" / "screenshots"
    panel = Panel(page, 1)
    panel.run.scroll_into_view_if_needed()
    panel.run.click()
    panel.says(re.compile(r"^step \d+: \w+( \d+)? …$"))
    page.screenshot(path=shots / "whatif-4-progress.png")
    panel.cancel.click()
    panel.says("cancelled")
    expect(panel.run).to_be_enabled()
    expect(panel.cancel).to_be_disabled()
    assert panel.figures.count() == 0, "a cancelled run shows nothing as found"
    page.screenshot(path=shots / "whatif-5-cancelled.png")
