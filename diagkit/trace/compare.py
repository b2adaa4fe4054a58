"""Two runs side by side: where do they part first, and what was different before they began.

The answer is one place a rank, and one for all ranks that part alike. What a comparison cannot say (ranks that only
one run has, another model, another detail) is told with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from diagkit.errors import TraceError
from diagkit.language import msg, tr, trn
from diagkit.trace.merged import Trace
from diagkit.trace.nouns import counted, ranks_named
from diagkit.trace.partings import Alignment, Parted, Walk, align, failed
from diagkit.trace.patterns import compress
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import (
    BUFFER,
    PARAMETER,
    EngineFacts,
    Facts,
    GroupFacts,
    Header,
    Moment,
    OptimizerFacts,
    Residency,
    Row,
)
from diagkit.trace.spans import spans_text
from diagkit.trace.values import clip, printable

__all__ = ["SHOWN", "Comparison", "Difference", "Parting", "compare", "further_places"]

#: Patterns of names and partings that the text writes out.
SHOWN = 6
_INDEX = re.compile(r":[0-9]+")
_SETUP = ("world_size", "device", "simulated", "torch", "detail", "backends", "revision", "diagkit")


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows that are one thing in the first run (A) and another in the second (B), right after the runs parted."""

    kind: str
    names: tuple[str, ...]
    first: str  # "npu:0/cpu pinned", or "not there"
    second: str

    @property
    def where(self) -> tuple[str, ...]:
        """The rows as patterns."""
        return tuple(printable(str(pattern)) for pattern in compress(self.names))

    def lines(self) -> list[str]:
        rows = counted(self.kind, len(self.names))
        return [tr("{rows}: A {first}, B {second}", rows=rows, first=self.first, second=self.second), _few(self.where)]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step after which these ranks of the two runs differ. ``phase`` counts from 1, 0 is outside any."""

    ranks: tuple[int, ...]
    phase: int
    phase_name: str
    first: str  # what run A did there
    second: str  # what run B did there
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "phase": self.phase,
            "phase_name": self.phase_name,
            "a": self.first,
            "b": self.second,
            "differences": [
                {"kind": d.kind, "where": list(d.where), "count": len(d.names), "a": d.first, "b": d.second}
                for d in self.differences
            ],
        }

    def lines(self) -> list[str]:
        where = tr("in {place}", place=self.place) if self.phase else tr("outside any phase")
        out = [tr("{ranks}: the runs part {where}", ranks=ranks_named(self.ranks), where=where)]
        out += [f"  A: {self.first}", f"  B: {self.second}"]
        for difference in self.differences[:SHOWN]:
            what, which = difference.lines()
            out += [f"  {what}", f"    {which}"]
        if more := len(self.differences[SHOWN:]):
            further = trn("and {count} further kind of difference", "and {count} further kinds of difference", more)
            out.append(f"  {further}")
        return out

    @property
    def place(self) -> str:
        """The phase, in words."""
        if not self.phase:
            return tr("what is outside any phase")
        return tr("phase {number} ({name})", number=self.phase, name=self.phase_name)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    ``ranks`` were compared; ``partings``, the earliest first; ``model``: what only one model has; ``setup``: what was
    different before anything moved; ``notes``: what could not be compared.
    """

    ranks: tuple[int, ...]
    partings: tuple[Parting, ...]
    model: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def equal(self) -> bool:
        """Nothing that could be compared differs; how the runs were set up does not count."""
        return not self.partings and not self.model

    def to_json(self) -> dict[str, Any]:
        """Plain data: ``equal``, ``partings``, ``model``, ``setup``, ``notes``, ``ranks``, ``simulated``."""
        return {
            "equal": self.equal,
            "ranks": list(self.ranks),
            "partings": [parting.to_json() for parting in self.partings],
            "model": list(self.model),
            "setup": list(self.setup),
            "notes": list(self.notes),
            "simulated": self.simulated,
        }

    def lines(self) -> list[str]:
        """The comparison for a terminal."""
        out = []
        if not self.partings:
            head = msg("no difference: {ranks} lived alike in both runs")
            if not self.equal:
                head = msg("no difference in what both models have: {ranks} lived alike in both runs")
            out.append(tr(head, ranks=ranks_named(self.ranks)))
        for parting in self.partings[:SHOWN]:
            out += parting.lines()
        if len(self.partings) > SHOWN:
            out.append(further_places(len(self.partings) - SHOWN))
        out += [f"{tr('model')}: {line}" for line in self.model]
        out += [f"{tr('set up differently')}: {line}" for line in self.setup]
        out += [f"{tr('note')}: {line}" for line in self.notes]
        if self.simulated:
            out.append(f"{tr('note')}: {tr('recorded on a simulated accelerator')}")
        return [printable(line) for line in out]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        from diagkit.views.comparison import comparison_html

        return comparison_html(self)


def further_places(count: int) -> str:
    """What is not written out."""
    return trn("and {count} further place, on other ranks", "and {count} further places, on other ranks", count)


def compare(first: Trace, second: Trace) -> Comparison:
    """Where two runs part first, rank by rank.

    Raises:
        TraceError: they have no rank or no parameter in common.
    """
    both = [rank for rank in first.ranks if rank in second.ranks]
    if not both:
        raise TraceError(
            "the two runs have no rank in common",
            found=f"{ranks_named(tuple(first.ranks))} and {ranks_named(tuple(second.ranks))}",
            remedy="Compare runs of which the same rank was recorded",
        )
    pairs = _Pairs(first, second)
    notes = [*_notes(first, second, both), *_values(*pairs.probed)]
    walks = [pairs.walk((Residency,))]
    if first.world_size == second.world_size:
        # What groups, optimizers and engines say of themselves decides only where all tensors lived alike.
        walks.append(pairs.walk((GroupFacts, OptimizerFacts, EngineFacts)))
    partings: tuple[Parting, ...] = ()
    for walk in walks:
        partings = partings or pairs.partings(walk, both)
    return Comparison(
        tuple(both),
        partings,
        model=tuple(pairs.model()),
        setup=tuple(_setup(first, second)),
        notes=tuple(notes),
        simulated=first.simulated or second.simulated,
    )


class _Pairs:
    """The ranks of two runs, pair by pair."""

    def __init__(self, first: Trace, second: Trace) -> None:
        self._first = first
        self._second = second
        self.probed = _probed(first), _probed(second)
        self._alignments: dict[tuple[int, int, int, int], Alignment] = {}

    def walk(self, kinds: tuple[type[Facts], ...]) -> Walk:
        details = {rank.header.detail for trace in (self._first, self._second) for rank in trace}
        loose = self._first.world_size != self._second.world_size
        return Walk(kinds, edges_only=len(details) > 1, loose=loose, values=self.probed[0] == self.probed[1])

    def alignment(self, first: RankTrace, second: RankTrace) -> Alignment:
        """Ranks that were read together share their rows: each pair of tables is matched once."""
        key = tuple(n for rank in (first, second) for n in (id(rank.rows[0]) if rank.rows else 0, len(rank.rows)))
        found = self._alignments.get(key)  # type: ignore[arg-type]
        if found is None:
            found = self._alignments[key] = align(first.rows, second.rows)  # type: ignore[index]
        return found

    def partings(self, walk: Walk, ranks: list[int]) -> tuple[Parting, ...]:
        """One for all ranks that part at the same step, the earliest first."""
        places: dict[object, _Place] = {}
        for rank in ranks:
            ours, theirs = self._first[rank], self._second[rank]
            rows = self.alignment(ours, theirs)
            found = walk.parted(ours, theirs, rows)
            if found is not None:
                did = _place(found.first, ours.header), _place(found.second, theirs.header)
                key = (found.phase.ordinal, found.phase.name, found.edges, *did)
                places.setdefault(key, _Place(found)).add(rank, found, rows)
        partings = [place.parting() for place in places.values()]
        return tuple(sorted(partings, key=lambda parting: (parting.phase, parting.ranks)))

    def model(self) -> Iterator[str]:
        """What only one of the models has."""
        told: dict[str, None] = {}
        for rows in self._alignments.values():
            for text, only in (
                (msg("only A has {rows}"), rows.only_first),
                (msg("only B has {rows}"), rows.only_second),
                (msg("other shapes: {rows}"), rows.reshaped),
            ):
                if only:
                    told[tr(text, rows=_counted(only))] = None
        return iter(told)


class _Place:
    """Ranks that part at one step, with the rows of all of them."""

    def __init__(self, first: Parted) -> None:
        self._first = first
        self._ranks: list[int] = []
        self._names: dict[tuple[str, str, str], dict[str, None]] = {}

    def add(self, rank: int, found: Parted, rows: Alignment) -> None:
        self._ranks.append(rank)
        groups: dict[tuple[str, Facts | None, Facts | None], list[str]] = {}
        for at, a, b in found.differs:
            row = rows.rows[at]
            groups.setdefault((row.kind, a, b), []).append(row.label)
        for (kind, a, b), labels in groups.items():
            self._names.setdefault((kind, *_told(a, b)), {}).update(dict.fromkeys(labels))

    def parting(self) -> Parting:
        first = self._first
        return Parting(
            tuple(self._ranks),
            first.phase.ordinal,
            first.phase.name,
            _did(first.first, first.edges[0]),
            _did(first.second, first.edges[1]),
            tuple(Difference(kind, tuple(names), a, b) for (kind, a, b), names in self._names.items()),
        )


def _place(moment: Moment | None, header: Header) -> object:
    return moment and (moment.label, moment.cause, failed(moment, header))


def _told(a: Facts | None, b: Facts | None) -> tuple[str, str]:
    """The two residencies in a few words, without the device's index where it is not the point.

    Where these are the same, the fields that differ.
    """
    texts = _short(a), _short(b)
    plain = tuple(_INDEX.sub("", text) for text in texts)
    if plain[0] != plain[1]:
        return plain[0], plain[1]
    if texts[0] != texts[1] or a is None or b is None or type(a) is not type(b):
        return texts
    other = [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
    first, second = (", ".join(f"{name}={getattr(its, name)}" for name in other) for its in (a, b))
    return first, second


def _short(facts: Facts | None) -> str:
    if facts is None:
        return tr("not there")
    return facts.short() if isinstance(facts, Residency) else tr("there")


def _did(moment: Moment | None, edge: str) -> str:
    if moment is None:
        return tr("nothing more changed before {edge}", edge=edge)
    failure = moment.failure
    if failure is not None:
        text = tr(
            "{operation} raised {error}",
            operation=failure.operation or moment.label,
            error=f"{failure.type}: {' '.join(failure.message.split())}",
        )
    else:
        text = moment.label
    return clip(f"{text} ({moment.cause})" if moment.cause else text, 400)


def _counted(rows: list[Row]) -> str:
    names = [str(pattern) for pattern in compress(row.name for row in rows)]
    return f"{trn('{count} row', '{count} rows', len(rows))}: {_few(names)}"


def _few(texts: Sequence[str]) -> str:
    more = trn(" and {count} more", " and {count} more", len(texts) - SHOWN) if len(texts) > SHOWN else ""
    return ", ".join(clip(text, 120) for text in texts[:SHOWN]) + more


def _notes(first: Trace, second: Trace, both: list[int]) -> Iterator[str]:
    for name, trace in (("A", first), ("B", second)):
        if alone := tuple(rank for rank in trace.ranks if rank not in both):
            yield tr("only {name} has {ranks}: not compared", name=name, ranks=ranks_named(alone))
        damaged = [rank.rank for rank in trace if rank.problems]
        if damaged:
            text = msg("{name} has damaged or cut off ranks ({ranks}): what is lost is not compared")
            yield tr(text, name=name, ranks=spans_text(damaged))
    if first.world_size != second.world_size:
        yield tr("world sizes differ: shards without elements, groups, optimizers and engines are not compared")
    details = {rank.header.detail for trace in (first, second) for rank in trace}
    if len(details) > 1:
        text = msg("details differ ({details}): compared at the edges of phases alone")
        yield tr(text, details=", ".join(sorted(details)))
    if first.header.device != second.header.device:
        text = msg("devices differ: {first} and {second} are both compared as the accelerator")
        yield tr(text, first=first.header.device, second=second.header.device)


def _probed(trace: Trace) -> tuple[str, ...]:
    """Kinds of row of which somewhere a value was recorded."""
    found: set[str] = set()
    for rank in trace:
        told = {n for n, facts in enumerate(rank.facts) if isinstance(facts, Residency) and facts.digest is not None}
        changes = (change for moment in rank.moments for change in moment.changes) if told else ()
        found.update(rank.rows[change.start].kind for change in changes if change.facts in told)
    return tuple(sorted(found))


def _values(*probed: tuple[str, ...]) -> Iterator[str]:
    if probed[0] != probed[1]:
        words = {PARAMETER: tr("parameters"), BUFFER: tr("buffers")}
        first, second = (tr(" and ").join(words[kind] for kind in kinds) or tr("nothing") for kinds in probed)
        text = msg("values were recorded of {first} in A, of {second} in B: they are not compared")
        yield tr(text, first=first, second=second)


def _setup(first: Trace, second: Trace) -> Iterator[str]:
    ours, theirs = first.header, second.header
    for name in _SETUP:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            yield tr("{what}: A {first}, B {second}", what=name, first=a or "-", second=b or "-")
    for name in dict.fromkeys([*ours.job, *theirs.job]):
        a, b = ours.job.get(name), theirs.job.get(name)
        if a != b:
            yield clip(tr("job, {what}: A {first}, B {second}", what=name, first=a, second=b))
    if ours.argv != theirs.argv:
        words = " ".join(ours.argv), " ".join(theirs.argv)
        yield clip(tr("arguments: A {first}, B {second}", first=words[0], second=words[1]), 400)
