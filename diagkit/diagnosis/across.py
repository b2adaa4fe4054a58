"""What ranks show only beside each other: that they disagree, or share a device.

Ranks with the same rows are compared where outermost phases begin and end, and where traces end. The cost follows
what differs: equal histories have equal numbers and are compared once; of those that differ, whole states are held
against each other, as lists of numbers, where one of them changed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from diagkit.diagnosis.finding import Finding
from diagkit.diagnosis.judge import Hit
from diagkit.diagnosis.moments import Judged, judged_moments
from diagkit.diagnosis.rule import Rule, Subject, World, find_rules
from diagkit.diagnosis.rules.ranks import alike_on_all_ranks
from diagkit.diagnosis.seats import Seat, seat_of
from diagkit.language import tr
from diagkit.trace import RankTrace
from diagkit.trace.schema import ABSENT, BUFFER, Facts, Moment, Residency
from diagkit.trace.spans import spans_text

#: Where ranks are compared: ordinal, name, and whether the phase ends or begins; (-1, "", "last"): the trace ends.
Rest = tuple[int, str, str]
#: In place of a number: nothing of the tensor is on this rank.
EMPTY = -1
#: Buffers of batch normalisation, each rank's own without SyncBatchNorm.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def disagreements(ranks: Iterable[RankTrace]) -> Iterator[Hit]:
    """Where a rank's tensors are in another state than those of most ranks."""
    numbers = _Numbers()
    tables: dict[int, list[_Life]] = {}
    for rank in ranks:
        if rank.rows:
            tables.setdefault(hash(rank.rows[0]), []).append(_Life(rank, numbers))
    for lives in tables.values():
        kinds: dict[object, list[_Life]] = {}
        for life in lives:
            kinds.setdefault(life.history, []).append(life)
        # Of equally many, those that did less: who moved something is told, not who stood still.
        shared = [rest for rest in lives[0].rests if all(rest in life.rests for life in lives)][-1:]
        usual = min(kinds.values(), key=lambda those: (-len(those), [those[0].moved[rest] for rest in shared]))
        for alike in kinds.values():
            if alike is not usual:
                yield from _differences(alike, usual[0], numbers)


def shared_seats(ranks: Iterable[RankTrace], world_size: int) -> Iterator[Finding]:
    """Ranks of one node that compute on the same physical device."""
    (rule,) = find_rules("DK803")
    found: dict[tuple[str, str], list[tuple[int, Seat]]] = {}
    for rank in ranks:
        if (seat := seat_of(rank)) is not None:
            found.setdefault((seat.host, seat.physical), []).append((rank.rank, seat))
    for those in found.values():
        (_, first), (_, last) = those[0], those[-1]
        if len(those) > 1 and rule.asks(Subject("rank", first, World(), other=last)):
            on = tuple(sorted(rank for rank, _ in those))
            said = (
                tr("ranks {ranks} of host {host} compute on one device", ranks=spans_text(on), host=first.host),
                tr("physical device: {name}", name=first.physical),
            )
            yield Finding(rule, rule.severity, (first.device,), "", on, world_size, "", 0, said)


class _Numbers:
    """Gives what is compared of a record a number; 0 for what is not, `EMPTY` for a tensor without elements."""

    def __init__(self) -> None:
        self.facts: list[Facts | None] = [None]
        self._known: dict[Facts, int] = {}
        self._seen: dict[Facts, int] = {}
        self.values = False  # whether anybody recorded values

    def of(self, facts: Facts | None) -> int:
        """The number of a record."""
        if facts is None:
            return 0
        number = self._seen.get(facts)
        if number is None:
            alike = alike_on_all_ranks(facts)
            nothing = EMPTY if isinstance(facts, Residency) and facts.empty else 0
            number = nothing if alike is None else self._known.setdefault(alike, len(self.facts))
            if alike is not None and number == len(self.facts):
                self.facts.append(alike)
            self._seen[facts] = number
            self.values |= isinstance(facts, Residency) and facts.digest is not None
        return number


@dataclass(slots=True)
class _Life:
    """One rank's states where it came to rest."""

    rank: RankTrace
    numbers: _Numbers
    rests: dict[Rest, tuple[Judged, int]] = field(default_factory=dict)  # the moment, and a number of its history
    moved: dict[Rest, int] = field(default_factory=dict)  # runs of rows that calls had changed by then

    def __post_init__(self) -> None:
        table = self.table()
        at = {entry.moment.index: entry for entry in judged_moments(self.rank) if entry.resting}
        state = moved = 0
        for moment in self.rank.moments:
            if moment.changes or moment.key:
                told = tuple((c.start, c.count, table[c.facts]) for c in moment.changes)
                state = hash((0 if moment.key else state, told))
                moved += len(told) * (moment.cause is not None)
            if (entry := at.get(moment.index)) is not None:
                rest = self._rest(entry)
                self.rests[rest], self.moved[rest] = (entry, state), moved

    def table(self) -> list[int]:
        """Number in this rank's trace -> number of what is compared."""
        return [self.numbers.of(facts) for facts in self.rank.facts]

    def _rest(self, entry: Judged) -> Rest:
        phase = self.rank.phases.get(entry.moment.phase)
        if entry.why == "last" or phase is None:
            return (-1, "", "last")
        return (phase.ordinal, phase.name, entry.why)

    @property
    def history(self) -> tuple[tuple[Rest, int], ...]:
        """What equal ranks have in common."""
        return tuple((rest, state) for rest, (_, state) in self.rests.items())

    def states(self, wanted: Iterable[Rest]) -> Iterator[list[int]]:
        """What is compared, row by row, at each of these rests in turn. The list is one and the same."""
        table, moments = self.table(), iter(self.rank.moments)
        state = [0] * len(self.rank.rows)
        for rest in wanted:
            until = self.rests[rest][0].moment.index
            for moment in moments:
                if moment.key:
                    state[:] = [0] * len(state)
                for change in moment.changes:
                    state[change.start : change.start + change.count] = [table[change.facts]] * change.count
                if moment.index == until:
                    break
            yield state


def _differences(alike: list[_Life], usual: _Life, numbers: _Numbers) -> Iterator[Hit]:
    """What sets these ranks, all of one history, apart from the usual one: a hit per rank, state and beginning."""
    first = alike[0]
    began, apart = _beginnings(first, usual, numbers)
    groups: dict[tuple[str, _Beginning], list[int]] = {}
    for row, beginning in began.items():
        groups.setdefault((first.rank.rows[row].kind, beginning), []).append(row)
    for (kind, began_so), rows in groups.items():
        here, there = numbers.facts[began_so.here], numbers.facts[began_so.there]
        rule = None if here is None else _rule(kind, here, there, began_so.agreed)
        if rule is not None and rule.code == "DK502":
            rows = [row for row in rows if first.rank.rows[row].name.rpartition(".")[2] not in STATISTICS]
        if here is None or rule is None or not rows:
            continue
        note = tr("beside rank {rank}: {differences}", rank=usual.rank.rank, differences=_told(here, there))
        lasting = not apart.keys().isdisjoint(rows)
        for life in alike:
            judged = life.rests[began_so.rest][0]
            origin = _origin(life.rank, rows[0], judged.moment) or _origin(usual.rank, rows[0], judged.moment)
            yield Hit(rule, life.rank, dict.fromkeys(rows, ABSENT), origin, judged, lasting=lasting, note=note)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Where a row was first in two states, and in which; ``agreed``: it had been in one before."""

    rest: Rest
    here: int
    there: int
    agreed: bool


def _beginnings(
    first: _Life, usual: _Life, numbers: _Numbers
) -> tuple[dict[int, _Beginning], dict[int, tuple[int, int]]]:
    """Since when each row differs that ever did, and what differs at the end."""
    common = [rest for rest in first.rests if rest in usual.rests]
    compared = _compared(first.rank, usual.rank)
    buffers = [row.id for row in first.rank.rows[:compared] if row.kind == BUFFER] if numbers.values else []
    began: dict[int, _Beginning] = {}
    agreed: set[int] = set()
    apart: dict[int, tuple[int, int]] = {}
    before = (0, 0)
    for rest, mine, theirs in zip(common, first.states(common), usual.states(common), strict=True):
        now = first.rests[rest][1], usual.rests[rest][1]
        if now != before:
            apart = {} if now[0] == now[1] or mine == theirs else _apart(mine, theirs, compared)
        before = now
        for row, (here, there) in apart.items():
            if row not in began:
                began[row] = _Beginning(rest, here, there, row in agreed)
        # A cache that was empty once got what it holds later, as what was equal once did.
        agreed.update(row for row in buffers if mine[row] == theirs[row] != 0 or EMPTY in (mine[row], theirs[row]))
    return began, apart


def _rule(kind: str, here: Facts, there: Facts | None, agreed: bool) -> Rule | None:
    """The rule that holds between two states of one row."""
    subject = Subject(kind, here, World(), other=there)
    found = (rule for code in ("DK801", "DK502") for rule in find_rules(code) if kind in rule.kinds)
    # Values that were the same once are what training made of them.
    return next((rule for rule in found if rule.asks(subject) and not (agreed and rule.code == "DK502")), None)


def _compared(one: RankTrace, other: RankTrace) -> int:
    """How many rows, from the first, are the same ones on both ranks."""
    n = min(len(one.rows), len(other.rows))
    if one.rows[n - 1] is other.rows[n - 1]:
        return n
    same = (a is b or a == b for a, b in zip(one.rows, other.rows, strict=False))
    return next((row for row, equal in enumerate(same) if not equal), n)


def _apart(mine: list[int], theirs: list[int], compared: int) -> dict[int, tuple[int, int]]:
    differ = itertools.compress(range(compared), map(operator.ne, mine, theirs))
    return {row: (mine[row], theirs[row]) for row in differ if mine[row] > 0 and theirs[row] > 0}


def _told(here: Facts, there: Facts | None) -> str:
    """``"storage device cpu, not npu; pinned True, not None"``."""
    if type(there) is not type(here):
        return ""
    parts = [(f.name.replace("_", " "), getattr(here, f.name), getattr(there, f.name)) for f in fields(here)]
    return "; ".join(tr("{field} {here}, not {there}", field=n, here=a, there=b) for n, a, b in parts if a != b)


def _origin(rank: RankTrace, row: int, until: Moment) -> Moment | None:
    """The call by which the row took the facts that it has at a moment, None where no observed call did."""
    found: Moment | None = None
    number = ABSENT
    for moment in rank.moments[: until.index + 1]:
        for change in moment.changes:
            if change.start <= row < change.start + change.count and change.facts != number:
                found, number = moment, change.facts
    return found if found is not None and found.cause is not None else None
