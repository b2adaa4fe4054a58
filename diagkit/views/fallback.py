"""A widget for who has a kernel, and a page for who has not, in one output.

Widgets come out blank in static pages. So the page is always there, and the live widget brings the style that hides it:
no script takes part, and a notebook turned into HTML, or shown where no kernel runs, shows the page.
"""

from __future__ import annotations

import secrets
from typing import Any

__all__ = ["show"]


def show(widget: Any, static: str) -> None:
    """Display an ipywidgets widget; where it cannot live, the HTML in ``static`` is seen in its place."""
    import ipywidgets as widgets
    from IPython.display import HTML, display

    name = f"dk-static-{secrets.token_hex(4)}"
    hiding = widgets.HTML(f"<style>.{name}{{display:none}}</style>", layout=widgets.Layout(display="none"))
    page = HTML(f'<div class="{name}">{static}</div>')  # type: ignore[no-untyped-call]
    for output in (widgets.VBox([widget, hiding]), page):
        display(output)  # type: ignore[no-untyped-call]
