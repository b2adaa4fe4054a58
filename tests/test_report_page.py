"""The report's page in a real browser, offline: nobody is kept out, nothing is asked for, tables sort and filter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import CHROMIUM_ARGS
from traces import decoder_names, engine_trace

pytest.importorskip("playwright")
from pages import barriers, watch
from playwright.sync_api import Browser, Page, sync_playwright

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    before = engine_trace(decoder_names(3), ranks=2)
    after = engine_trace(decoder_names(3), ranks=2, guarded=True)
    path = tmp_path_factory.mktemp("report") / "report.html"
    return before.report(path, against=after).as_uri()


def opened(browser: Browser, address: str, **options: object) -> tuple[Page, list[str], list[str]]:
    page = browser.new_context(offline=True, **options).new_page()  # type: ignore[arg-type]
    console, outside = watch(page, address)
    page.goto(address)
    return page, console, outside


WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nobody_is_kept_out_and_nothing_is_asked_for(
    browser: Browser, address: str, size: dict[str, int], scheme: str
) -> None:
    page, console, outside = opened(browser, address, viewport=size, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert barriers(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page itself scrolls sideways"
    assert (console, outside) == ([], [])


def column(page: Page, table: str, number: int) -> list[str]:
    return [cell.inner_text() for cell in page.locator(f"#{table} tbody tr:visible > :nth-child({number})").all()]


def test_a_table_is_sorted_from_the_keyboard(browser: Browser, address: str) -> None:
    page, *_ = opened(browser, address, viewport=WIDE)
    head = page.locator("#residency thead th").nth(1)
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    counts = [int(text) for text in column(page, "residency", 2)]
    assert counts == sorted(counts) and len(set(counts)) > 1
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert [int(text) for text in column(page, "residency", 2)] == sorted(counts, reverse=True)


def test_a_table_is_filtered_by_words_in_any_order(browser: Browser, address: str) -> None:
    page, *_ = opened(browser, address, viewport=WIDE)
    page.get_by_label("Filter").last.focus()
    page.keyboard.type("split proj")
    names = column(page, "residency", 1)
    assert names and all("proj" in name for name in names)
    page.get_by_label("Filter").last.fill("")
    assert len(column(page, "residency", 1)) > len(names)


def test_without_its_script_the_page_shows_everything(browser: Browser, address: str) -> None:
    page, *_ = opened(browser, address, java_script_enabled=False)
    assert page.locator("th button").count() == 0
    assert len(column(page, "residency", 1)) == page.locator("#residency tbody tr").count() > 5
    page.locator("summary", has_text="reproduce.py").click()
    assert page.get_by_text("fully_shard(part, mesh=mesh").is_visible()


def test_every_link_leads_to_a_section(browser: Browser, address: str) -> None:
    page, *_ = opened(browser, address)
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href") or "#?").is_visible()


def test_on_paper_nothing_is_folded_away(browser: Browser, address: str) -> None:
    page, *_ = opened(browser, address)
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.get_by_text("fully_shard(part, mesh=mesh").is_visible()
    assert page.pdf()[:5] == b"%PDF-"
