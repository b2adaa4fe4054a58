"""The residency table: where tensors are at one moment, one line for all that share names and facts.

A record for every room: `inspect`, the demo and the views fill it alike. Its plain form needs nothing; its page form
is a door to the views, opened when a notebook asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from diagkit.language import tr
from diagkit.trace.patterns import compress
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import BUFFER, PARAMETER, Moment, Residency, Row
from diagkit.trace.values import middle, printable

#: Characters of one cell of the plain form; names in a trace may be absurdly long.
WIDTH = 120

__all__ = ["ResidencyLine", "ResidencyTable", "rank_of"]


def rank_of(rank: int, world_size: int) -> str:
    """Which rank: "rank 1 of 2" reads as the first of two, and ranks count from 0.

    >>> rank_of(1, 2), rank_of(0, 1)
    ('rank 1 (of 0..1)', '1 rank')
    """
    return f"rank {rank} (of 0..{world_size - 1})" if world_size > 1 else "1 rank"


@dataclass(frozen=True, slots=True)
class ResidencyLine:
    """``count`` tensors whose names are ``pattern``. ``storage_device`` is None where the bytes could not be read."""

    pattern: str
    count: int
    kind: str
    metadata_device: str
    storage_device: str | None
    pinned: bool | None
    split: bool = False
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.pattern if self.count == 1 else f"{self.pattern} ×{self.count:,}"


@dataclass(frozen=True, slots=True)
class ResidencyTable:
    """Lines in the order of the model. ``title`` says of what and when; ``simulated`` that the accelerator is."""

    lines: tuple[ResidencyLine, ...]
    title: str = ""
    simulated: bool = False

    @classmethod
    def of(cls, tensors: Iterable[tuple[Row, Residency]], title: str = "", simulated: bool = False) -> ResidencyTable:
        """The table of these tensors.

        >>> rows = [(Row(i, "parameter", "model", f"l.{i}.w"), Residency("cpu", "cpu", pinned=True)) for i in range(3)]
        >>> print(ResidencyTable.of(rows))
        tensor         metadata  bytes       notes
        l.{0..2}.w ×3  cpu       cpu pinned
        """
        groups: dict[tuple[object, ...], list[tuple[int, Row, Residency]]] = {}
        for at, (row, facts) in enumerate(tensors):
            key = (row.kind, row.model, row.part, _shown(facts))
            groups.setdefault(key, []).append((at, row, facts))
        several = len({row.model for group in groups.values() for _, row, _ in group}) > 1
        joined: dict[tuple[object, ...], tuple[int, ResidencyLine, list[str]]] = {}
        for group in groups.values():
            _, row, facts = group[0]
            first = {one.name: at for at, one, _ in reversed(group)}
            for pattern in compress(one.name for _, one, _ in group):
                text = f"{row.model}: {pattern.text}" if several else pattern.text
                line = ResidencyLine(text, pattern.count, row.kind, *_shown(facts))
                # Parts of one optimizer's state that live alike share a line.
                joined.setdefault((line,), (first[pattern.names[0]], line, []))[2].append(row.part)
        placed = sorted(joined.values(), key=lambda entry: entry[0])
        return cls(tuple(_with_parts(line, parts) for _, line, parts in placed), title, simulated)

    @classmethod
    def at(
        cls, rank: RankTrace, moment: int | Moment = -1, kinds: Iterable[str] = (PARAMETER, BUFFER)
    ) -> ResidencyTable:
        """The table of one rank right after one moment (a moment, or its index; negative ones count from the end)."""
        wanted = set(kinds)
        index = range(len(rank.moments))[moment if isinstance(moment, int) else moment.index]
        facts = rank.state(index).facts
        pairs = ((row, rank.facts[facts[row.id]]) for row in rank.rows if row.kind in wanted)
        header = rank.header
        device = f"simulated {header.device}" if header.simulated else header.device
        title = f"{rank_of(header.rank, header.world_size)}, {device}, torch {header.torch or '?'}"
        if len(rank.moments) > 1:
            title += f", at “{rank.moments[index].label}”"
        return cls.of(((row, f) for row, f in pairs if isinstance(f, Residency)), title, header.simulated)

    @property
    def splits(self) -> int:
        """How many tensors are split."""
        return sum(line.count for line in self.lines if line.split)

    @property
    def heading(self) -> str:
        """The title; it says so where the accelerator is simulated."""
        told = "simulated" in self.title or not self.simulated
        return self.title if told else f"{self.title} (simulated accelerator)".strip()

    def __iter__(self) -> Iterator[ResidencyLine]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("tensor", "metadata", "bytes", "notes")]
        for line in self.lines:
            place = (line.storage_device or "?") + (" pinned" if line.pinned else "")
            notes = ["SPLIT"] * line.split + ([line.kind] if line.kind == BUFFER else []) + list(line.notes)
            rows.append((line.name, line.metadata_device, place, ", ".join(notes)))
        rows = [tuple(printable(middle(cell, WIDTH)) for cell in row) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        text = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.heading, *text] if self.heading else text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from diagkit.views.html import table_html

        return table_html(self)


def _shown(facts: Residency) -> tuple[str, str | None, bool | None, bool, tuple[str, ...]]:
    return facts.metadata_device, facts.storage_device, facts.pinned, facts.split, _notes(facts)


def _with_parts(line: ResidencyLine, parts: list[str]) -> ResidencyLine:
    if line.kind in (PARAMETER, BUFFER):
        return line
    told = ", ".join(filter(None, parts)) or line.kind.replace("_", " ")
    return replace(line, pattern=f"{line.pattern} [{told}]", count=line.count * len(parts))


def _notes(facts: Residency) -> tuple[str, ...]:
    """What is unusual about a tensor beside its places, in a few words each."""
    notes = []
    if facts.unreadable:
        notes.append(tr("not readable: {why}", why=facts.unreadable))
    if facts.empty:
        notes.append(tr("no elements on this rank"))
    elif facts.aliased is False:
        notes.append(tr("FSDP2 gathers other bytes"))
    if facts.registered is False:
        notes.append(tr("not the parameter that FSDP2 gathers"))
    if facts.sharded_state not in (None, "sharded"):
        notes.append(facts.sharded_state or "")
    if facts.storage_dtype and facts.dtype != facts.storage_dtype:
        notes.append(tr("says {claimed}, holds {held}", claimed=facts.dtype, held=facts.storage_dtype))
    if not facts.shape_agrees:
        notes.append(tr("shapes disagree"))
    if facts.unwritten:
        notes.append(tr("nothing written yet"))
    if facts.shares == "tie":
        notes.append(tr("tied"))
    elif facts.shares == "stale":
        notes.append(tr("left behind by its parameter"))
    elif facts.shares == "written":
        notes.append(tr("its parameter's bytes, written since"))
    elif facts.shares:
        notes.append(tr("shares its parameter's bytes"))
    return tuple(notes)
