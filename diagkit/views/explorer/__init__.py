"""The explorer: a trace, or two side by side, to be looked through moment by moment.

`model` says what a choice shows, `panes` writes it as HTML, `widgets` lets a notebook choose, `page` is what a page
without a kernel shows. Only `widgets` needs ipywidgets.
"""

from diagkit.views.explorer.explorer import Explorer, explore

__all__ = ["Explorer", "explore"]
