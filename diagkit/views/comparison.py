"""Two runs side by side as HTML: where they part, who did what there, which rows differ."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from diagkit.trace.spans import spans_text
from diagkit.views.html import framed, grid
from diagkit.views.scene import clean

if TYPE_CHECKING:
    from diagkit.trace.compare import Comparison, Parting

__all__ = ["comparison_html"]

#: Partings shown; the rest is counted.
SHOWN = 8


def comparison_html(found: Comparison) -> str:
    """A comparison, as a fragment without script."""
    head = found.lines()[0] if not found.partings else f"The runs part in {_where(found.partings[0])}"
    parts = [f'<h4 class="{"good" if found.equal else "bad"}">{escape(clean(head))}</h4>']
    parts += [_parting(parting) for parting in found.partings[:SHOWN]]
    if len(found.partings) > SHOWN:
        parts.append(f'<p class="quiet">and {len(found.partings) - SHOWN} further places, on other ranks</p>')
    lines = [*(f"model: {line}" for line in found.model), *(f"set up differently: {line}" for line in found.setup)]
    lines += [*found.notes, *(["recorded on a simulated accelerator"] if found.simulated else [])]
    return framed("".join([*parts, *_quiet(lines)]))


def _parting(parting: Parting) -> str:
    did = "".join(
        f"<p><b>{name}</b> {escape(clean(text))}</p>" for name, text in (("A", parting.first), ("B", parting.second))
    )
    rows = [
        [
            escape(f"{len(d.names):,} {d.kind.replace('_', ' ')}{'s' * (len(d.names) > 1)}"),
            escape(clean(d.first)),
            escape(clean(d.second)),
            "<br>".join([escape(clean(text)) for text in d.where[:SHOWN]] + ["…"] * (len(d.where) > SHOWN)),
        ]
        for d in parting.differences
    ]
    caption = f"rank{'s' * (len(parting.ranks) > 1)} {spans_text(parting.ranks)}; right after that in {_where(parting)}"
    return did + (grid(clean(caption), ("what differs", "in A", "in B", "which"), rows) if rows else "")


def _where(parting: Parting) -> str:
    return f"phase {parting.phase} ({parting.phase_name})" if parting.phase else "what is outside any phase"


def _quiet(lines: Iterable[str]) -> list[str]:
    return [f'<p class="quiet">{escape(clean(line))}</p>' for line in lines]
