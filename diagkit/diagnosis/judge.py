"""Asks the rules about one rank's states.

The cost follows what differs: a rule is asked once per distinct set of facts, rows are looked at only where some
row could matter, and a state that did not change since it was last judged is not judged again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from diagkit.diagnosis.fold import Fold, Table, fold
from diagkit.diagnosis.layout import layout_of
from diagkit.diagnosis.moments import Judged, is_look, judged_moments
from diagkit.diagnosis.past import PASTS, Pasts
from diagkit.diagnosis.rule import Rule, Subject, World, all_rules
from diagkit.diagnosis.signatures import said
from diagkit.trace import RankTrace
from diagkit.trace.schema import (
    ABSENT,
    BUFFER,
    ENGINE,
    EXPORT,
    GROUP,
    OPTIMIZER,
    PARAMETER,
    EngineFacts,
    Facts,
    Failure,
    GroupFacts,
    Moment,
    OptimizerFacts,
    Residency,
    Row,
)

#: Kind of row -> its record; any other kind is a tensor's.
RECORDS: dict[str, type[Facts]] = {GROUP: GroupFacts, OPTIMIZER: OptimizerFacts, ENGINE: EngineFacts}


@dataclass(slots=True)
class Hit:
    """One rule held for some rows of one rank, from ``origin`` (the moment since which it does) on."""

    rule: Rule
    rank: RankTrace
    facts: dict[int, int]  # row (of the fold, where there is one) -> number of its facts when it was last judged
    origin: Moment | None
    judged: Judged
    failures: list[Moment] = field(default_factory=list)  # exceptions that speak of it
    lasting: bool = False
    note: str = ""  # what no facts of this rank alone can say
    fold: Fold | None = None

    def spans(self) -> Iterator[tuple[int, int]]:
        """The rows' numbers in table order, each run as its first and one past its last."""
        if self.fold is not None:
            return self.fold.spans(self.facts)
        return ((number, number + 1) for number in sorted(self.facts))

    @property
    def first(self) -> Row:
        """The first of the rows."""
        return self.rank.rows[next(self.spans())[0]]

    @property
    def rows(self) -> list[Row]:
        """The rows, in table order."""
        return [row for first, end in self.spans() for row in self.rank.rows[first:end]]


class Judge:
    """Judges ranks one after another and remembers what it asked."""

    def __init__(self) -> None:
        self._rules = all_rules()
        self._tables: dict[int, Table] = {}
        self._suspects: dict[tuple[object, ...], tuple[Rule, ...]] = {}

    def rank(self, trace: RankTrace, failure: Failure | None = None) -> list[Hit]:
        """What the rules find in a rank's trace.

        ``failure``: an exception met in the last state (a live look after it).
        """
        folded = fold(trace, self._table(trace))
        hits = _Run(self, folded.trace, failure).hits()
        for hit in hits:
            hit.rank, hit.fold = trace, folded
        return hits

    def _table(self, trace: RankTrace) -> Table:
        """What folding needs to know of the rank's rows; ranks that were read together share their list of rows."""
        known = self._tables.get(id(trace.rows))
        if known is None:
            known = self._tables[id(trace.rows)] = Table(trace.rows)  # which keeps the list alive, so that its id stays
        return known

    def suspects(self, kind: str, facts: Facts, around: frozenset[Facts | None], world: World) -> tuple[Rule, ...]:
        """Rules that such a row could meet in some context of this rank: more than do, never fewer."""
        key = (kind, facts, around, world.accelerator, world.said, world.failure is None)
        found = self._suspects.get(key)
        if found is None:
            groups = [None, *(f for f in around if isinstance(f, GroupFacts))]
            owners = [None, *(f for f in around if isinstance(f, Residency))]
            found = tuple(
                rule
                for rule in self._rules
                if kind in rule.kinds
                and any(
                    rule.asks(Subject(kind, facts, world, part, group, owner, past))
                    for group in groups
                    for owner in (owners if kind not in (PARAMETER, BUFFER, GROUP, ENGINE) else [None])
                    for part in ("", "step")
                    for past in PASTS
                )
            )
            self._suspects[key] = found
        return found


class _Run:
    """One rank, moment after moment."""

    def __init__(self, judge: Judge, trace: RankTrace, failure: Failure | None) -> None:
        self.judge = judge
        self.trace = trace
        self.layout = layout_of(trace.rows)
        self.extra = failure
        self.live = is_look(trace)
        count = len(trace.rows)
        self.facts: list[int] = [ABSENT] * count
        self.since: list[int] = [-1] * count  # moment at which the row took the facts that it has
        self.pasts = Pasts(trace)
        self.found: dict[tuple[str, int], Hit] = {}
        self.open: dict[str, dict[int, tuple[str, int]]] = {}  # code -> row -> key of its hit, at the last rest
        self.world = World()
        self.cache: dict[tuple[object, ...], bool] = {}  # answers in this world
        self.doubts: dict[tuple[str, int], tuple[Rule, ...]] = {}
        self.seen = self._kinds_of_facts()
        self.around = frozenset(trace.facts[number] for _, number in self.seen)
        failures = [moment.failure for moment in trace.failures if moment.failure] + ([failure] if failure else [])
        self.any_world = World(
            accelerator=self._accelerator,
            groups=tuple(f for f in self.around if isinstance(f, GroupFacts)),
            mixed=frozenset({""}),
            engines=tuple(f for f in self.around if isinstance(f, EngineFacts)),
            backends=trace.header.backends,
            failure=next((f for f in failures if f.asks), None),
            said=frozenset().union(*(said(f.message) for f in failures)),
            live=True,
        )

    def hits(self) -> list[Hit]:
        if not any(self._doubts(kind, number) for kind, number in self.seen):
            return []  # nothing that this rank ever shows could interest any rule
        judged: dict[int, list[Judged]] = {}
        for entry in judged_moments(self.trace):
            judged.setdefault(entry.moment.index, []).append(entry)
        dirty = True
        for moment in self.trace.moments:
            self._replay(moment)
            dirty = dirty or bool(moment.changes) or moment.key
            for entry in judged.get(moment.index, ()):
                unchanged = entry.resting and not dirty and self.extra is None
                if not unchanged:
                    self._judge(entry)
                elif entry.why == "begins":
                    self._judge(entry, due_only=True)
                # What begins may be forgiven something that is a fault where it ends.
                dirty = dirty and (not entry.resting or entry.why == "begins")
        for keys in self.open.values():
            for key in set(keys.values()):
                self.found[key].lasting = True
        for hit in self.found.values():
            # What is a fault only when an operation is due lasts for as long as its facts do.
            if not hit.lasting and not hit.rule.rests:
                hit.lasting = all(self.facts[row] == number for row, number in hit.facts.items())
        return list(self.found.values())

    def _replay(self, moment: Moment) -> None:
        facts, since = self.facts, self.since
        self.pasts.note(moment, facts)
        before = facts.copy() if moment.key else facts
        if moment.key:
            facts[:] = [ABSENT] * len(facts)
        for change in moment.changes:
            end = change.start + change.count
            kept = set()  # facts from which this one is no news
            if moment.key or self._may_carry_on(change.facts):
                olds = set(before[change.start : end])
                kept = {old for old in olds if old == change.facts or self._same_trouble(old, change.facts)}
            if not kept:
                since[change.start : end] = [moment.index] * change.count
            elif kept != olds:
                for row in range(change.start, end):
                    if before[row] not in kept:
                        since[row] = moment.index
            facts[change.start : end] = [change.facts] * change.count

    def _may_carry_on(self, number: int) -> bool:
        """Whether a row with these facts may only carry on a trouble that it had before."""
        facts = self.trace.facts[number]
        if isinstance(facts, GroupFacts):
            return facts.stale
        return isinstance(facts, Residency) and (facts.split or facts.metadata_device == "meta")

    def _same_trouble(self, old: int, new: int) -> bool:
        before, after = self.trace.facts[old], self.trace.facts[new]
        if isinstance(before, GroupFacts):
            return before.stale
        return isinstance(before, Residency) and isinstance(after, Residency) and before.short() == after.short()

    def _judge(self, entry: Judged, due_only: bool = False) -> None:
        failure = entry.moment.failure if entry.why == "failed" else None
        if entry.why == "last" and self.extra is not None:
            failure = self.extra
        phase = self.trace.phases.get(entry.moment.phase)
        about_to = phase.name if entry.why == "begins" and phase is not None else ""
        world = self._world(failure, entry.resting, about_to)
        if world != self.world:
            self.world, self.cache = world, {}
        held: dict[str, dict[int, tuple[str, int]]] = {}
        for rule, rows in self._held(due_only).items():
            if not entry.resting and not world.said.intersection(rule.says):
                continue
            held[rule.code] = keys = self._keys(rule, rows, entry)
            if keys is self.open.get(rule.code) and entry.why != "failed":
                continue  # nothing new: told already, for the same rows
            for key in dict.fromkeys(keys.values()):
                hit = self.found.get(key)
                if hit is None:
                    origin = self.trace.moments[key[1]] if key[1] >= 0 else None
                    hit = self.found[key] = Hit(rule, self.trace, {}, origin, entry)
                hit.facts.update((row, self.facts[row]) for row, its in keys.items() if its == key)
                if entry.why == "failed" and entry.moment not in hit.failures:
                    hit.failures.append(entry.moment)
        if due_only:
            self.open.update(held)
        elif entry.resting:
            self.open = held
            self.pasts.rest(self.facts)

    def _keys(self, rule: Rule, rows: list[int], entry: Judged) -> dict[int, tuple[str, int]]:
        """Which hit each row belongs to: the one that it was part of, else one per moment at which it began."""
        known = self.open.get(rule.code)
        if known is not None and known.keys() == set(rows):
            return known
        keys = {}
        for row in rows:
            key = known.get(row) if known else None
            if key is None:
                # Where nothing was wrong until this operation, its call is the cause.
                calm = entry.resting or self._asks(rule, row, calm=True)
                key = (rule.code, self.since[row] if calm else entry.moment.index)
            keys[row] = key
        return keys

    def _held(self, due_only: bool) -> dict[Rule, list[int]]:
        """The rules that hold now, and the rows for which they do."""
        found: dict[Rule, list[int]] = {}
        groups = {n for kind, first, end in self.layout.segments if kind == GROUP for n in self.facts[first:end]}
        for kind, first, end in self.layout.segments:
            if due_only and kind != ENGINE:
                continue
            facts = self.facts[first:end]
            # Where all groups are alike, equal facts get equal answers.
            alike = kind == PARAMETER and self.layout.rooted and len(groups) <= 1 and not self.pasts.of_parameters
            for number in set(facts):
                rules = self._doubts(kind, number) if number != ABSENT else ()
                rows = [first + i for i, its in enumerate(facts) if its == number] if rules else []
                for rule in rules:
                    if alike:
                        holds = rows if self._asks(rule, rows[0]) else []
                    else:
                        holds = [row for row in rows if self._asks(rule, row)]
                    if holds:
                        found.setdefault(rule, []).extend(holds)
        return found

    def _doubts(self, kind: str, number: int) -> tuple[Rule, ...]:
        found = self.doubts.get((kind, number))
        if found is None:
            facts = self.trace.facts[number]
            fits = isinstance(facts, RECORDS.get(kind, Residency))  # a hostile trace may give a row any record
            found = self.judge.suspects(kind, facts, self.around, self.any_world) if facts and fits else ()
            self.doubts[kind, number] = found
        return found

    def _asks(self, rule: Rule, number: int, calm: bool = False) -> bool:
        """Whether the rule holds for a row now; ``calm``: whether it would, had nothing failed."""
        row = self.trace.rows[number]
        owner = row.of if row.of is not None else number
        group = self._group(owner)
        group_number = ABSENT if group is None else self.facts[group]
        owner_number = self.facts[row.of] if row.of is not None else ABSENT
        past = self.pasts.of(number)
        key = (rule.code, row.kind, row.part, self.facts[number], group_number, owner_number, past, row.model, calm)
        answer = self.cache.get(key)
        if answer is None:
            facts = self.trace.facts[self.facts[number]]
            group_facts = self.trace.facts[group_number]
            owner_facts = self.trace.facts[owner_number]
            assert facts is not None
            subject = Subject(
                row.kind,
                facts,
                replace(self.world, said=frozenset(), failure=None, resting=True) if calm else self.world,
                row.part.rpartition(":")[2],
                group_facts if isinstance(group_facts, GroupFacts) else None,
                owner_facts if isinstance(owner_facts, Residency) else None,
                past,
                model=row.model,
            )
            answer = self.cache[key] = rule.asks(subject)
        return answer

    def _group(self, number: int) -> int | None:
        """The row of the FSDP group that a row's parameter belongs to: that of the nearest enclosing module."""
        known = self.layout.group_of
        if number not in known:
            row = self.trace.rows[number]
            name = row.name
            found = None
            while found is None:
                found = self.layout.groups.get((row.model, name))
                if not name:
                    break
                name = name.rpartition(".")[0]
            known[number] = None if row.kind == GROUP else found
        return known[number]

    @property
    def _accelerator(self) -> str | None:
        device = self.trace.header.device
        return None if device == "cpu" else device

    def _world(self, failure: Failure | None, resting: bool, about_to: str) -> World:
        present = {
            number
            for kind, first, end in self.layout.segments
            if kind in (GROUP, ENGINE, OPTIMIZER, EXPORT)
            for number in self.facts[first:end]
        }
        found = [self.trace.facts[number] for number in sorted(present) if number != ABSENT]
        return World(
            accelerator=self._accelerator,
            groups=tuple(f for f in found if isinstance(f, GroupFacts)),
            mixed=self._mixed(),
            optimizers=tuple(f for f in found if isinstance(f, OptimizerFacts)),
            engines=tuple(f for f in found if isinstance(f, EngineFacts)),
            exports=frozenset(f for f in found if isinstance(f, Residency)),
            backends=self.trace.header.backends,
            failure=failure,
            said=said(failure.message) if failure else frozenset(),
            resting=resting,
            about_to=about_to,
            live=self.live,
        )

    def _mixed(self) -> frozenset[str]:
        """Models whose groups do not all have the same kind of policy."""
        policies: dict[str, set[bool]] = {}
        for (model, _), row in self.layout.groups.items():
            facts = self.trace.facts[self.facts[row]]
            if isinstance(facts, GroupFacts) and facts.parameters:
                policies.setdefault(model, set()).add(facts.offload)
        return frozenset(model for model, found in policies.items() if len(found) > 1)

    def _kinds_of_facts(self) -> set[tuple[str, int]]:
        """Every (kind of row, number of its facts) that this rank ever shows."""
        seen: set[tuple[str, int]] = set()
        segments = self.layout.segments
        ends = [end for _, _, end in segments]
        for moment in self.trace.moments:
            for change in moment.changes:
                at = bisect.bisect_right(ends, change.start)
                while at < len(segments) and segments[at][1] < change.start + change.count:
                    seen.add((segments[at][0], change.facts))
                    at += 1
        return {(kind, number) for kind, number in seen if number != ABSENT}
