"""The explorer in a real JupyterLab in a real browser: what is chosen by hand and by keyboard is what is seen.

Screenshots are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import nbformat
import pytest
from notebook_server import MINUTES, NotebookServer, errors, run_all, serve
from pages import barriers, watch
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = pathlib.Path(__file__).parent
CODE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from traces import engine_trace
import diagkit as dk
explorer = dk.explore(engine_trace(ranks=2), engine_trace(ranks=2, guarded=True), names=("Unguarded", "Guarded"))
explorer
"""


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookServer]:
    home = tmp_path_factory.mktemp("explorer")
    (home / "notebooks").mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(notebook, home / "notebooks" / "explorer.ipynb")
    with serve(home) as server:
        yield server


@pytest.fixture(scope="module")
def page(jupyterlab: NotebookServer, browser: Browser) -> Iterator[Page]:
    """The notebook, run, with nothing to complain of at the end."""
    expect.set_options(timeout=MINUTES / 2)  # its kernel shares the machine with other tests
    page = browser.new_page(viewport={"width": 1400, "height": 1500})
    console, outside = watch(page, jupyterlab.address)
    run_all(page, jupyterlab, "explorer.ipynb")
    try:
        expect(state(page)).to_be_visible(timeout=2 * MINUTES)
    finally:
        shot(page, "start")
    assert errors(page).count() == 0
    yield page
    page.close()
    expect.set_options(timeout=5000)
    assert not console, "JupyterLab's console is silent"
    assert not outside, "nothing is fetched from elsewhere"


def shot(page: Page, name: str) -> None:
    folder = HERE.parent / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"explorer-{name}.png")


def state(page: Page) -> Locator:
    """The table of where everything is."""
    return page.locator(".jp-OutputArea-output .widget-html table").first


def choose(page: Page, label: str, option: str) -> None:
    """By the label that a reader sees, as a hand would. (ipywidgets puts hard spaces into an option.)"""
    box = page.get_by_label(label, exact=True)
    value = box.locator(
        "option", has_text=re.compile("^" + re.escape(option).replace("\\ ", "\\s"))
    ).first.get_attribute("value")
    box.select_option(value)


def at(page: Page) -> Locator:
    """The name of the moment."""
    return page.get_by_label("At", exact=True).locator("option:checked")


def test_it_begins_at_the_failure_with_both_runs_beside_each_other(page: Page) -> None:
    expect(state(page).locator("caption")).to_have_text(
        "A: Unguarded · rank 0, 10 save: state_dict raises | B: Guarded · rank 0, 10 after save"
    )
    rows = state(page).locator("tbody tr")
    assert rows.count() == 7
    assert rows.first.locator(".chip").all_inner_texts() == ["npu:0", "cpu · pinned", "cpu", "cpu · pinned"]
    expect(rows.first).to_contain_text("split in A, runs differ")
    expect(rows.last).not_to_contain_text("split")
    expect(page.get_by_text("Module.state_dict raises RuntimeError").first).to_be_visible()
    expect(page.get_by_role("heading", name="A: Module.state_dict")).to_be_visible()
    expect(page.get_by_role("heading", name="B: save: exit")).to_be_visible()
    for label, chosen in (("Phase", "all phases"), ("Run", "Unguarded"), ("Lifeline", "none")):
        expect(page.get_by_label(label, exact=True).locator("option:checked")).to_have_text(chosen)


def test_the_page_for_who_has_no_kernel_is_hidden_here(page: Page) -> None:
    static = page.locator("[class^=dk-static]")
    expect(static).to_have_count(1)
    expect(static).to_be_hidden()


def test_the_slider_moves_by_keyboard_and_the_state_follows(page: Page) -> None:
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    caption = state(page).locator("caption")
    expect(caption).to_contain_text("A: Unguarded · rank 0, 9 save: Module.to")
    expect(at(page)).to_have_text("9 save: Module.to")
    expect(page.get_by_text("engine.py:41 in save_checkpoint")).to_be_visible()
    expect(state(page).locator("tbody tr").first).to_contain_text("moved here")
    page.keyboard.press("ArrowLeft")
    expect(caption).to_contain_text("8 before save")
    expect(state(page).locator(".split")).to_have_count(0)


def test_the_filter_leaves_what_it_names_and_says_when_nothing_is_named_so(page: Page) -> None:
    box = page.get_by_label("Filter", exact=True)
    box.fill("*.q_proj.*")
    expect(state(page).locator("tbody th")).to_have_text(
        ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    )
    box.fill("nothing of the kind")
    expect(page.get_by_text("No tensor has this in its name.")).to_be_visible()
    box.fill("")
    expect(state(page).locator("tbody tr")).to_have_count(7)


def test_a_phase_narrows_the_slider(page: Page) -> None:
    choose(page, "Phase", "1 init")
    expect(at(page)).to_have_text("4 after init")
    expect(page.get_by_label("At", exact=True).locator("option")).to_have_count(5)
    expect(state(page).locator("caption")).to_contain_text("4 after init")
    choose(page, "Phase", "all phases")
    expect(page.get_by_label("At", exact=True).locator("option")).to_have_count(12)
    choose(page, "At", "3 ")
    expect(state(page).locator("caption")).to_contain_text("3 init: Module.cpu")


def test_a_finding_leads_to_its_moment_its_tensors_and_a_lifeline(page: Page) -> None:
    choose(page, "Finding", "DK101")
    expect(state(page).locator("caption")).to_contain_text("save")
    expect(state(page).locator("tbody tr")).to_have_count(6)
    expect(state(page).locator(".split").first).to_be_visible()
    expect(page.get_by_role("img", name="In save, Module.to splits model.embed_tokens.weight")).to_be_visible()
    shot(page, "finding")


def test_a_tensor_is_chosen_for_its_lifeline(page: Page) -> None:
    choose(page, "Lifeline", "lm_head.weight")
    expect(page.get_by_role("img", name="In save, Module.to splits lm_head.weight")).to_be_visible()


def test_another_rank_shows_its_own_devices(page: Page) -> None:
    choose(page, "Finding", "all tensors")
    expect(state(page).locator("tbody tr")).to_have_count(7)
    choose(page, "Rank", "1")
    expect(state(page).locator("caption")).to_contain_text("A: Unguarded · rank 1")
    expect(state(page).locator("tbody tr").first.locator(".chip").first).to_have_text("npu:1")


def test_the_other_run_leads_when_it_is_chosen(page: Page) -> None:
    choose(page, "Run", "Guarded")
    expect(state(page).locator("caption")).to_contain_text("A: Guarded · rank 1")
    expect(page.get_by_label("Finding", exact=True).locator("option:checked")).to_have_text("no residency hazard found")
    shot(page, "guarded")


def test_everything_is_reached_by_the_tab_key_and_no_barrier_is_in_the_way(page: Page) -> None:
    page.get_by_label("Run", exact=True).focus()
    reached = []
    for _ in range(13):
        reached.append(page.evaluate("document.activeElement.getAttribute('role') || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    selects, panes = ["SELECT"] * 3, ["DIV"] * 3
    assert reached == [*selects, "INPUT", "SELECT", "slider", "SELECT", *panes, "SELECT", "BUTTON", "BUTTON"]
    # The handle of ipywidgets' slider has no name, and nothing in Python reaches it: the list "At" is its named twin.
    found = [line for line in barriers(page, ".jp-OutputArea-output .widget-vbox") if "noUi-handle" not in line]
    assert not found


def test_the_view_is_saved_beside_the_notebook(page: Page, jupyterlab: NotebookServer) -> None:
    for button, name in (("Save as SVG", "explorer.svg"), ("Save as page", "explorer.html")):
        page.get_by_role("button", name=button).click()
        expect(page.get_by_text(f"Written: {name}")).to_be_visible()
        assert "lm_head.weight" in (jupyterlab.folder / name).read_text()
