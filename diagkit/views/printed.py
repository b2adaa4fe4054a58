"""Text for a notebook's output: JupyterLab breaks a printed line that is too wide for the page inside a word."""

from __future__ import annotations

import textwrap

__all__ = ["wrapped"]


def wrapped(text: object, width: int = 100) -> str:
    """What prints as ``text``, with every line that is wider than ``width`` characters continued between two words.

    What continues a line is indented by two more than the line. A word that is wider itself stays whole.

    >>> print(wrapped("told:\\n  a line that is somewhat too wide", width=22))
    told:
      a line that is
        somewhat too wide
    """
    lines = []
    for line in str(text).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)
