"""What several ranks show at the same moment, as one: a line per state, with the ranks that are in it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from diagkit.diagnosis import Findings, diagnose
from diagkit.diagnosis.finding import named_ranks
from diagkit.trace import RankTrace, Trace
from diagkit.trace.schema import TENSOR_KINDS, Residency, Row, device_type
from diagkit.trace.table import ResidencyLine, ResidencyTable

_NOTHING = "no exception to explain"
_INDEX = re.compile(r"\b([a-z]+):\d+\b")


@dataclass(frozen=True)
class RanksView:
    """The residency table and the findings of all ranks that are in the trace."""

    trace: Trace

    @property
    def table(self) -> ResidencyTable:
        """Where every tensor is, ranks that agree on one line."""
        return merged_table(self.trace)

    @property
    def findings(self) -> Findings:
        return diagnose(self.trace)

    def __repr__(self) -> str:
        missing = "".join(f"\nnot here: {problem}" for problem in self.trace.problems)
        return f"{self.table}\n\n{self.findings!r}{missing}"

    def _repr_html_(self) -> str:
        missing = "".join(f"<p>not here: {html.escape(problem)}</p>" for problem in self.trace.problems)
        return f"<div>{self.table._repr_html_()}{self.findings._repr_html_()}{missing}</div>"


@dataclass(frozen=True)
class TextOfRanks:
    """What each rank has to say, equal texts once."""

    texts: Mapping[int, str]
    world_size: int

    def __repr__(self) -> str:
        if self.world_size == 1:
            return next(iter(self.texts.values())) or _NOTHING
        groups: dict[str, tuple[list[int], str]] = {}
        for rank, text in sorted(self.texts.items()):
            own = "\n".join(line for line in text.splitlines() if not line.startswith("  ranks: ")) or _NOTHING
            # One of ranks that differ in nothing but the index of their device speaks for all.
            groups.setdefault(_INDEX.sub(r"\1", own), ([], own))[0].append(rank)
        return "\n\n".join(f"{named_ranks(tuple(ranks), self.world_size)}: {own}" for ranks, own in groups.values())


def merged_table(trace: Trace) -> ResidencyTable:
    """The last moment of every rank in one table. The index of a device differs from rank to rank and is left out."""
    if len(trace) == 1 and trace.world_size == 1:
        return ResidencyTable.at(next(iter(trace)), kinds=TENSOR_KINDS)
    lines: dict[ResidencyLine, list[int]] = {}
    for rank in trace:
        for line in ResidencyTable.of(_without_index(rank)):
            lines.setdefault(line, []).append(rank.rank)
    header = trace.header
    device = f"{'simulated ' if trace.simulated else ''}{header.device}"
    told = tuple(
        line
        if len(ranks) == trace.world_size
        else replace(line, notes=(*line.notes, f"{named_ranks(tuple(ranks), trace.world_size)}"))
        for line, ranks in lines.items()
    )
    title = f"{named_ranks(tuple(trace.ranks), trace.world_size)}, {device}, torch {header.torch or '?'}"
    return ResidencyTable(told, title, trace.simulated)


def _without_index(rank: RankTrace) -> list[tuple[Row, Residency]]:
    if not rank.moments:
        return []
    found = []
    for row, number in zip(rank.rows, rank.state(-1).facts, strict=True):
        facts = rank.facts[number]
        if row.kind in TENSOR_KINDS and isinstance(facts, Residency):
            # A tensor without elements on a rank is where the others' are.
            found.append(
                (
                    row,
                    replace(
                        facts,
                        metadata_device=device_type(facts.metadata_device) or "",
                        storage_device=device_type(facts.storage_device),
                        flat_device=device_type(facts.flat_device),
                    ),
                )
            )
    return found
