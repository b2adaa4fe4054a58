"""Pages in a real browser: what they complain of, what they ask of other machines, and what axe finds in them."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

#: Impacts that fail a test, of axe's minor, moderate, serious and critical.
SERIOUS = frozenset({"serious", "critical"})


def watch(page: Page, address: str) -> tuple[list[str], list[str]]:
    """The page's errors and its requests beyond ``address``; both lists grow while the page lives."""
    console: list[str] = []
    outside: list[str] = []
    page.on("console", lambda message: console.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: console.append(str(error)))
    local = (address, address.replace("http", "ws", 1), "data:", "blob:")
    page.on("request", lambda request: outside.append(request.url) if not request.url.startswith(local) else None)
    return console, outside


def barriers(page: Page, within: str | None = None) -> list[str]:
    """What keeps people from using the page, or the part of it that a CSS selector names: a line per element.

    axe-core's rules of serious and critical impact. The script comes with a package and enters by the browser's
    debugging door: nothing is fetched, and a page whose policy forbids scripts is judged all the same.
    """
    found = Axe().run(page, within).response["violations"]
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for violation in found
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]
