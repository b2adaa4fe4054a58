"""The helpers that judge pages find what is wrong with one."""

from __future__ import annotations

import pytest
from pages import barriers, watch
from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

PAGE = (
    '<!DOCTYPE html><html lang="en"><head><title>A page</title>'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"></head>"
    "<body><main>{}</main></body></html>"
)


def test_a_page_that_forbids_scripts_is_judged_all_the_same(browser: Browser) -> None:
    page = browser.new_page()
    console, outside = watch(page, "about:")
    page.set_content(PAGE.format('<p style="color:#ccc;background:#fff">pale</p><p id="ink">plain</p>'))
    (pale,) = barriers(page)
    assert pale.startswith("color-contrast (serious)") and "pale" in pale
    assert not barriers(page, within="#ink")
    assert not console and not outside
    page.close()


def test_what_a_page_fetches_and_throws_is_seen(browser: Browser) -> None:
    page = browser.new_page()
    console, outside = watch(page, "about:")
    page.set_content('<img alt="x" src="http://127.0.0.1:9/x.png"><script>throw new Error("oh")</script>')
    assert outside == ["http://127.0.0.1:9/x.png"]
    assert any("oh" in line for line in console)
    page.close()
