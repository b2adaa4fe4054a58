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
from diagkit.trace.merged import Trace
from diagkit.trace.partings import Alignment, Parted, Walk, align, failed
from diagkit.trace.patterns import compress
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import EngineFacts, Facts, GroupFacts, Header, Moment, OptimizerFacts, Residency, Row
from diagkit.trace.spans import spans_text
from diagkit.trace.values import clip, printable

__all__ = ["Comparison", "Difference", "Parting", "compare"]

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
        noun = self.kind.replace("_", " ")
        count = f"{len(self.names):,} {noun}{'s' * (len(self.names) > 1)}"
        return [f"{count}: A {self.first}, B {self.second}", f"  {_few(self.where)}"]


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
        place = f"in phase {self.phase} ({self.phase_name})" if self.phase else "outside any phase"
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {spans_text(self.ranks)}"
        out = [f"{ranks}: the runs part {place}", f"  A: {self.first}", f"  B: {self.second}"]
        out += [f"  {line}" for difference in self.differences[:SHOWN] for line in difference.lines()]
        if len(self.differences) > SHOWN:
            out.append(f"  and {len(self.differences) - SHOWN} further kinds of difference")
        return out


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
            ranks = f"rank{'s' * (len(self.ranks) > 1)} {spans_text(self.ranks)}"
            head = "no difference" if self.equal else "no difference in what both models have"
            out.append(f"{head}: {ranks} lived alike in both runs")
        for parting in self.partings[:SHOWN]:
            out += parting.lines()
        if len(self.partings) > SHOWN:
            out.append(f"and {len(self.partings) - SHOWN} further places, on other ranks")
        out += [f"model: {line}" for line in self.model]
        out += [f"set up differently: {line}" for line in self.setup]
        out += [f"note: {line}" for line in self.notes]
        if self.simulated:
            out.append("note: recorded on a simulated accelerator")
        return [printable(line) for line in out]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        from diagkit.views.comparison import comparison_html

        return comparison_html(self)


def compare(first: Trace, second: Trace) -> Comparison:
    """Where two runs part first, rank by rank.

    Raises:
        TraceError: they have no rank or no parameter in common.
    """
    both = [rank for rank in first.ranks if rank in second.ranks]
    if not both:
        raise TraceError(
            "the two runs have no rank in common",
            found=f"ranks {spans_text(tuple(first.ranks))} and ranks {spans_text(tuple(second.ranks))}",
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
            for text, only in (("only A has", rows.only_first), ("only B has", rows.only_second)):
                if only:
                    told[f"{text} {_counted(only)}"] = None
            if rows.reshaped:
                told[f"other shapes: {_counted(rows.reshaped)}"] = None
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
        return "not there"
    return facts.short() if isinstance(facts, Residency) else "there"


def _did(moment: Moment | None, edge: str) -> str:
    if moment is None:
        return f"nothing more changed before {edge}"
    failure = moment.failure
    if failure is not None:
        text = f"{failure.operation or moment.label} raised {failure.type}: {' '.join(failure.message.split())}"
    else:
        text = moment.label
    return clip(f"{text} ({moment.cause})" if moment.cause else text, 400)


def _counted(rows: list[Row]) -> str:
    names = [str(pattern) for pattern in compress(row.name for row in rows)]
    return f"{len(rows):,} row{'s' * (len(rows) > 1)}: {_few(names)}"


def _few(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(clip(text, 120) for text in texts[:SHOWN]) + more


def _notes(first: Trace, second: Trace, both: list[int]) -> Iterator[str]:
    for name, trace in (("A", first), ("B", second)):
        if alone := tuple(rank for rank in trace.ranks if rank not in both):
            yield f"only {name} has rank{'s' * (len(alone) > 1)} {spans_text(alone)}: not compared"
        damaged = [rank.rank for rank in trace if rank.problems]
        if damaged:
            yield f"{name} has damaged or cut off ranks ({spans_text(tuple(damaged))}): what is lost is not compared"
    if first.world_size != second.world_size:
        yield "world sizes differ: shards without elements, groups, optimizers and engines are not compared"
    details = {rank.header.detail for trace in (first, second) for rank in trace}
    if len(details) > 1:
        yield f"details differ ({', '.join(sorted(details))}): compared at the edges of phases alone"
    if first.header.device != second.header.device:
        yield f"devices differ: {first.header.device} and {second.header.device} are both compared as the accelerator"


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
        first, second = (" and ".join(f"{kind}s" for kind in kinds) or "nothing" for kinds in probed)
        yield f"values were recorded of {first} in A, of {second} in B: they are not compared"


def _setup(first: Trace, second: Trace) -> Iterator[str]:
    ours, theirs = first.header, second.header
    for name in _SETUP:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            yield f"{name}: A {a or '-'}, B {b or '-'}"
    for name in dict.fromkeys([*ours.job, *theirs.job]):
        a, b = ours.job.get(name), theirs.job.get(name)
        if a != b:
            yield clip(f"job, {name}: A {a}, B {b}")
    if ours.argv != theirs.argv:
        yield clip(f"arguments: A {' '.join(ours.argv)}, B {' '.join(theirs.argv)}", 400)
