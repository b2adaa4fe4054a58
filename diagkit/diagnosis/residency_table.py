"""Where every tensor is at one moment, equal ones together: the table that `inspect` shows."""

from __future__ import annotations

import html
from dataclasses import dataclass

from diagkit.diagnosis.finding import patterns
from diagkit.trace import RankTrace
from diagkit.trace.schema import TENSOR_KINDS, Moment, Residency

HEAD = ("what", "tensors", "metadata", "bytes", "pinned", "handles")


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors of one kind with one residency."""

    kind: str
    patterns: tuple[str, ...]
    count: int
    facts: Residency

    def cells(self) -> tuple[str, ...]:
        """The line's text, a cell per column of `HEAD`."""
        facts = self.facts
        shown = ", ".join(self.patterns[:2]) + (f", {len(self.patterns) - 2} more" if len(self.patterns) > 2 else "")
        pinned = {True: "yes", False: "no", None: "-"}[facts.pinned]
        handles = (
            "apart"
            if facts.aliased is False and not facts.empty
            else "replaced"
            if facts.registered is False
            else "one"
        )
        kind = self.kind.replace("_", " ")
        return (
            kind if self.count == 1 else f"{self.count} {kind}s",
            shown,
            facts.metadata_device,
            facts.storage_device or "unreadable",
            pinned,
            handles if facts.aliased is not None else "-",
        )


@dataclass(frozen=True, slots=True)
class ResidencyTable:
    """Lines, and a title that says whose they are."""

    title: str
    lines: tuple[Line, ...]

    def __repr__(self) -> str:
        rows = [HEAD, *(line.cells() for line in self.lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        marks = ["  ", *("! " if line.facts.split else "  " for line in self.lines)]
        return "\n".join([self.title, *(mark + text for mark, text in zip(marks, body, strict=True))])

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str, split: bool = False) -> str:
            style = "text-align:left" + (";outline:2px solid crimson" if split else "")
            return "<tr>" + "".join(f"<{tag} style='{style}'>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(row(line.cells(), "td", line.facts.split) for line in self.lines)
        return f"<table><caption>{html.escape(self.title)}</caption>{row(HEAD, 'th')}{body}</table>"


def residency_table(rank: RankTrace, moment: Moment | int = -1) -> ResidencyTable:
    """The table of a rank at a moment (default: the last)."""
    groups: dict[tuple[str, Residency], list[str]] = {}
    if rank.moments:
        for row, number in zip(rank.rows, rank.state(moment).facts, strict=True):
            facts = rank.facts[number]
            if row.kind in TENSOR_KINDS and isinstance(facts, Residency):
                name = f"{row.name} [{row.part}]" if row.part else row.name
                groups.setdefault((row.kind, facts), []).append(name)
    lines = [Line(kind, tuple(patterns(names)), len(names), facts) for (kind, facts), names in groups.items()]
    lines.sort(key=lambda line: TENSOR_KINDS.index(line.kind))
    device = f"{'simulated ' if rank.header.simulated else ''}{rank.header.device}"
    title = f"rank {rank.header.rank} of {rank.header.world_size}, {device}, torch {rank.header.torch}"
    return ResidencyTable(title, tuple(lines))
