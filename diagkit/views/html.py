"""Traces and tables as HTML for a notebook or a page: no script, no outside reference, nothing but the standard
library.

The rules: every text is escaped, for traces come from strangers; a colour never stands alone; a table has a caption and
headings that a screen reader announces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from diagkit.errors import UsageError
from diagkit.trace.schema import BUFFER
from diagkit.views import palette
from diagkit.views.scene import clean

if TYPE_CHECKING:
    from diagkit.trace.merged import Trace
    from diagkit.trace.reader import RankTrace
    from diagkit.trace.table import ResidencyTable

__all__ = ["chip", "framed", "grid", "table_html", "trace_html"]

#: Lines of a table that a notebook shows; the rest is counted.
LINES = 200

STYLE = f"""
.dkt{{font:13px/1.45 'DejaVu Sans',Verdana,sans-serif;color:{palette.INK};background:{palette.GROUND};padding:10px 14px;border-radius:6px;overflow-x:auto}}
.dkt table{{font:inherit;border-collapse:collapse;margin:6px 0}}
.dkt caption{{text-align:left;color:{palette.MUTED};padding:2px 0 6px}}
.dkt th,.dkt td{{text-align:left!important;padding:3px 14px 3px 0;border:0;white-space:nowrap;vertical-align:top}}
.dkt thead th{{color:{palette.MUTED};font-weight:normal;border-bottom:1px solid {palette.FAINT}}}
.dkt tbody th{{font-weight:normal}} .dkt tr{{background:none!important}}
.dkt .chip{{display:inline-block;min-width:4.5em;padding:1px 8px;border-radius:4px}}
.dkt .bad{{color:{palette.BAD}}} .dkt .good{{color:{palette.GOOD}}} .dkt .quiet{{color:{palette.MUTED}}}
.dkt .split{{outline:2px solid {palette.BAD}}}
.dkt p{{margin:2px 0}} .dkt h4{{margin:0 0 2px;font-size:15px}}
""".strip()  # noqa: E501


def table_html(table: ResidencyTable) -> str:
    """A residency table."""
    return framed(_residency(table))


def trace_html(trace: Trace) -> str:
    """A trace at a glance: what happened, phase by phase, and where everything was when it did."""
    from diagkit.trace.table import ResidencyTable
    from diagkit.views.story import tell
    from diagkit.views.verdict import context, judge

    failure = trace.first_failure
    rank = failure[0] if failure else next(iter(trace))
    parts = []
    try:
        story = tell(rank)
    except UsageError:
        parts.append(f"<h4>{escape(clean(repr(trace)[1:-1]))}</h4>")
    else:
        verdict = judge(story)
        parts.append(f"<h4>{escape(verdict.title)}</h4>")
        parts.append(f'<p class="{"good" if verdict.good else "bad"}">{escape(verdict.sentence)}</p>')
        parts.append(f'<p class="quiet">{escape(context(story))} · run {escape(clean(trace.header.run))}</p>')
        worst = max(story.every, key=lambda column: column.splits)
        moment = failure[1] if failure else worst.moment if not verdict.good else rank.moments[-1]
        parts += [_phases(rank), _residency(ResidencyTable.at(rank, moment))]
    troubles = [f"rank {one.rank}, the recorder itself: {trouble}" for one in trace for trouble in one.troubles]
    for problem in [*trace.problems, *troubles][:8]:
        parts.append(f'<p class="bad">{escape(clean(problem))}</p>')
    return framed("".join(parts))


def _residency(table: ResidencyTable) -> str:
    rows = []
    for line in table.lines[:LINES]:
        notes = [line.kind] if line.kind == BUFFER else []
        words = [escape(clean(note)) for note in (*notes, *line.notes)]
        words = ['<b class="bad">split</b>'] * line.split + words
        bytes_at = (line.storage_device or "?") + (" · pinned" if line.pinned else "")
        rows.append([
            escape(clean(line.pattern)) + (f' <span class="quiet">×{line.count:,}</span>' if line.count > 1 else ""),
            chip(line.metadata_device, line.metadata_device, line.split),
            chip(line.storage_device, bytes_at, line.split),
            ", ".join(words),
        ])  # fmt: skip
    caption = clean(table.heading)
    if len(table.lines) > LINES:
        caption += f" · {len(table.lines) - LINES} further lines are not shown"
    return grid(caption, ("tensor", "metadata says", "bytes are on", "notes"), rows)


def _phases(rank: RankTrace) -> str:
    rows = []
    for phase in list(rank.phases.values())[1 : LINES + 1]:
        failure = next((m.failure for m in rank.failures if m.phase == phase.ordinal and m.failure), None)
        if failure is not None:
            state = f'<span class="bad">fails: {escape(clean(failure.type))}</span>'
        elif phase.exit is None:
            state = '<span class="bad">never ended</span>'
        else:
            state = "ends well"
        calls = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in list(phase.calls.items())[:6])
        rows.append(
            [
                f"{phase.ordinal} {escape(clean(phase.name))}",
                state,
                f'<span class="quiet">{escape(clean(calls))}</span>',
            ]
        )
    return grid("Phases", ("phase", "outcome", "observed calls"), rows) if rows else ""


def chip(device: str | None, text: str, split: bool) -> str:
    """A device's name on its colour; a split has an outline."""
    colours = palette.device(device)
    edge = " split" if split else ""
    return (
        f'<span class="chip{edge}" style="background:{colours.fill};color:{colours.ink}">{escape(clean(text))}</span>'
    )


def grid(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; caption and heads are text. The first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{entry}</td>" for entry in row[1:])}</tr>' for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def framed(body: str) -> str:
    """The box that a notebook shows; the body is HTML already. What is wider scrolls, by keyboard too."""
    return f'<div class="dkt" tabindex="0"><style>{STYLE}</style>{body}</div>'
