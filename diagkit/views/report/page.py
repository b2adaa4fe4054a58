"""The report as one page that needs nothing else: no network, no server, and no script to be read.

The rules: every text is escaped by the template engine, characters that move a cursor or turn the direction of writing
are written out; the page's own policy lets it load nothing and run no script but the one whose hash it names; each
figure stands beside its words.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from diagkit import __version__
from diagkit.diagnosis.finding import SHOWN, prose_html, ranks_text
from diagkit.diagnosis.rule import MEANINGS
from diagkit.errors import MissingDependency, UsageError
from diagkit.language import tr, trn
from diagkit.trace.schema import PARAMETER
from diagkit.trace.values import printable
from diagkit.views import palette
from diagkit.views.report.content import Report
from diagkit.views.report.history import history
from diagkit.views.report.sentences import call_of, moment_of, on_ranks, public_call

__all__ = ["page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
#: Lines of a list that are written out.
LIMIT = 50
#: Lines of the table of tensors, and rows of a figure: a page is for reading, the JSON has more.
LINES, ROWS = 150, 12


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as the page shows it."""

    title: str
    svg: Markup
    words: str


def page(report: Report) -> str:
    """The whole page."""
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = _names()
    pictures = _pictures(report)
    wanted = {
        "happened": True,
        "fix": report.fix is not None,
        "first": bool(report.failures),
        "ranks": report.trace.world_size > 1,
        "history": bool(pictures["history"]),
        "reproduce": bool(report.script),
    }
    return (
        _environment()
        .from_string(_file("page.html"))
        .render(
            report=report,
            names=names,
            sections=[(id, name) for id, name in names.items() if wanted.get(id, True)],
            pictures=pictures,
            policy=Markup(_POLICY.format(digest)),
            css=Markup(_colours() + _file("page.css")),
            script=Markup(script),
            version=__version__,
            LIMIT=LIMIT,
            LINES=LINES,
            SHOWN=SHOWN,
        )
    )


def _names() -> dict[str, str]:
    """The sections by their anchors, in the order of reading."""
    return {
        "happened": tr("What happened"),
        "fix": tr("Did the fix hold?"),
        "first": tr("The first failure"),
        "findings": tr("Findings"),
        "timeline": tr("Timeline"),
        "tensors": tr("Where the tensors are"),
        "ranks": tr("The ranks"),
        "history": tr("This engine's history"),
        "reproduce": tr("Reproduce it"),
        "environment": tr("Environment"),
        "missing": tr("What is missing"),
        "impact": tr("Impact and actions"),
    }


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_visible, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["prose"] = _prose
    environment.globals.update(
        tr=tr,
        trn=trn,
        on_ranks=on_ranks,
        ranks_text=ranks_text,
        public_call=public_call,
        call_of=call_of,
        moment_of=moment_of,
        device_class=_device_class,
        MEANINGS=MEANINGS,
    )
    return environment


def _prose(value: str) -> Markup:
    return Markup(prose_html(value))


def _visible(value: Any) -> Any:
    """Text with control and direction characters written out; our own markup as it is."""
    if isinstance(value, Markup) or value is None:
        return value
    return "\n".join(map(printable, str(value).split("\n")))


_DEVICES = {"cpu": palette.CPU, "accelerator": palette.ACCELERATOR, "meta": palette.META, "unknown": palette.UNKNOWN}


def _device_class(device: str | None) -> str:
    colours = palette.device(device)
    return next(name for name, known in _DEVICES.items() if known == colours)


def _colours() -> str:
    """The palette's colours for the chips of the tables."""
    return "".join(f".{name}{{background:{c.fill};color:{c.ink}}}" for name, c in _DEVICES.items()) + "\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _pictures(report: Report) -> dict[str, list[Picture]]:
    """The figures of each section; one that has nothing to show is left out."""
    from diagkit import views

    trace, told = report.trace, report.told
    wanted: dict[str, list[Callable[[], Any]]] = {
        "timeline": [lambda: views.residency_map(trace, rank=told.rank, rows=ROWS)],
        "tensors": [lambda: views.bytes_by_device(trace, rank=told.rank)],
        "ranks": [lambda: views.rank_grid(trace, rows=ROWS)] if trace.world_size > 1 else [],
        "fix": [],
        "history": [],
    }
    if name := _blamed(report):
        wanted["timeline"].append(lambda: views.lifeline(trace, name, rank=told.rank))
    if (against := report.against) is not None:
        names = (tr("First run"), tr("Second run"))
        wanted["fix"].append(lambda: views.before_after(trace, against, names=names, rows=ROWS))
    if cells := history(trace):
        wanted["history"].append(lambda: views.outcome_matrix(cells))
    return {section: list(_drawn(figures)) for section, figures in wanted.items()}


def _blamed(report: Report) -> str:
    """The first parameter of the finding to blame: one lifeline stands for all that went the same way."""
    parameters = {row.name for row in report.told.rows if row.kind == PARAMETER}
    return next((name for finding in report.findings for name in finding.names if name in parameters), "")


def _drawn(figures: list[Callable[[], Any]]) -> Iterator[Picture]:
    for figure in figures:
        try:
            drawn = figure()
        except MissingDependency:
            raise
        except UsageError:  # nothing to show
            continue
        yield Picture(drawn.title, Markup(drawn.to_svg()), drawn.to_text())
