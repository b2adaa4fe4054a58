"""Two runs side by side as HTML: where they part, who did what there, which rows differ."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from diagkit.language import tr
from diagkit.trace.compare import further_places
from diagkit.trace.nouns import counted, ranks_named
from diagkit.views.html import framed, grid
from diagkit.views.scene import clean

if TYPE_CHECKING:
    from diagkit.trace.compare import Comparison, Parting

__all__ = ["comparison_html"]

#: Partings shown; the rest is counted.
SHOWN = 8


def comparison_html(found: Comparison) -> str:
    """A comparison, as a fragment without script."""
    head = found.lines()[0] if not found.partings else tr("The runs part in {place}", place=found.partings[0].place)
    parts = [f'<h4 class="{"good" if found.equal else "bad"}">{escape(clean(head))}</h4>']
    parts += [_parting(parting) for parting in found.partings[:SHOWN]]
    if len(found.partings) > SHOWN:
        parts.append(f'<p class="quiet">{escape(further_places(len(found.partings) - SHOWN))}</p>')
    lines = [f"{tr('model')}: {line}" for line in found.model]
    lines += [f"{tr('set up differently')}: {line}" for line in found.setup]
    lines += [*found.notes, *([tr("recorded on a simulated accelerator")] if found.simulated else [])]
    return framed("".join([*parts, *_quiet(lines)]))


def _parting(parting: Parting) -> str:
    did = "".join(
        f"<p><b>{name}</b> {escape(clean(text))}</p>" for name, text in (("A", parting.first), ("B", parting.second))
    )
    rows = [
        [
            escape(counted(d.kind, len(d.names))),
            escape(clean(d.first)),
            escape(clean(d.second)),
            "<br>".join([escape(clean(text)) for text in d.where[:SHOWN]] + ["…"] * (len(d.where) > SHOWN)),
        ]
        for d in parting.differences
    ]
    caption = tr("{ranks}; right after that in {place}", ranks=ranks_named(parting.ranks), place=parting.place)
    heads = (tr("what differs"), tr("in A"), tr("in B"), tr("which"))
    return did + (grid(clean(caption), heads, rows) if rows else "")


def _quiet(lines: Iterable[str]) -> list[str]:
    return [f'<p class="quiet">{escape(clean(line))}</p>' for line in lines]
