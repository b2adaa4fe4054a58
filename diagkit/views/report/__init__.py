"""The report for the engineer who was not there: one file that tells a run's story, from its trace alone.

One composition (`content`), three forms: a page, Markdown for an issue tracker, and JSON. No torch is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from diagkit.errors import MissingDependency, UsageError
from diagkit.language import language
from diagkit.trace import Trace
from diagkit.trace.values import clip
from diagkit.views.report.content import Report, compose

__all__ = ["FORMS", "Report", "compose", "form_of", "render", "write"]

FORMS = ("html", "md", "json")


def write(trace: Trace, path: str | os.PathLike[str], *, lang: str = "en", against: Trace | None = None) -> Path:
    """Write the report on a trace; the form follows the name: ``.html``, ``.md`` or ``.json``.

    ``lang`` is ``"en"`` or ``"zh"``; ``against`` a later run, for the question whether a fix held.

    Raises:
        UsageError: another ending, an unknown language, or the file cannot be written.
        MissingDependency: the page needs jinja2 and matplotlib (``pip install 'diagkit[report]'``).
    """
    place = Path(path)
    form = form_of(place)
    text = render(trace, form, lang=lang, against=against)
    try:
        place.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            "cannot write the report",
            found=getattr(error, "strerror", None) or str(error),
            where=clip(str(place)),
            remedy="Name a file in a folder that can be written",
        ) from None
    return place


def render(trace: Trace, form: str, *, lang: str = "en", against: Trace | None = None) -> str:
    """The report as text, in one of `FORMS`."""
    with language(lang):
        report = compose(trace, against)
        if form == "json":
            from diagkit.views.report.data import json_text

            return json_text(report)
        if form == "md":
            from diagkit.views.report.markdown import markdown

            return markdown(report)
        try:
            from diagkit.views.report.page import page
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("jinja2", "markupsafe"):
                raise
            raise MissingDependency("the page needs jinja2", remedy="pip install 'diagkit[report]'") from None
        return page(report)


def form_of(path: Path) -> str:
    """Which form a file's name asks for.

    Raises:
        UsageError: none of them.
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(
            "no form of a report",
            found=path.suffix or "no ending",
            expected=", ".join(f".{form}" for form in FORMS),
            where=clip(str(path)),
            remedy="Name the file report.html, say",
        )
    return form
