"""What happened on one rank, phase by phase: what moved, whose line moved it, what failed.

The rules: a phase in which the same happened as in the one before of its name (the hundredth training step) is told
with it, counted; times are seconds since the trace began, by the rank's own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from diagkit.language import tr
from diagkit.trace import RankTrace
from diagkit.trace.nouns import counted
from diagkit.trace.patterns import compress
from diagkit.trace.schema import CALL, TENSOR_KINDS, Cause, Moment, Phase, Residency, Row
from diagkit.trace.values import series

__all__ = ["Chapter", "Event", "timeline"]

#: Chapters told, and events of one.
CHAPTERS, EVENTS = 200, 40


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` is "move", "split" (a move that parts metadata and bytes for longer than its phase lasts, or until
    something fails), "failure" or "call" (nothing moved).

    ``times``: so many in a row.
    """

    seconds: float
    kind: str
    what: str
    cause: Cause | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class Chapter:
    """One phase, or ``times`` of them in a row in which the same happened.

    ``lasted`` is None for one without an end.
    """

    ordinal: int
    name: str
    label: str
    seconds: float
    lasted: float | None
    outcome: str  # "ok", "failed", "open"
    times: int = 1
    events: tuple[Event, ...] = ()

    @property
    def alike(self) -> tuple[object, ...]:
        """What two chapters share that are told as one."""
        return (
            series(self.name),
            series(self.label),
            self.outcome,
            tuple((event.kind, event.what, event.times) for event in self.events),
        )


def timeline(rank: RankTrace) -> list[Chapter]:
    """The chapters of one rank, in order."""
    events: dict[int, list[Event]] = {}
    for moment, event in sorted(_events(rank), key=lambda pair: pair[0].index):
        found = events.setdefault(moment.phase, [])
        if found and (found[-1].kind, found[-1].what) == (event.kind, event.what):
            found[-1] = replace(found[-1], times=found[-1].times + 1)
        elif len(found) < EVENTS:
            found.append(event)
    chapters: list[Chapter] = []
    for phase in rank.phases.values():
        if phase.ordinal == 0 and 0 not in events:
            continue
        chapter = _chapter(rank, phase, events.get(phase.ordinal, []))
        if chapters and chapters[-1].alike == chapter.alike:
            lasted = None if chapters[-1].lasted is None else chapters[-1].lasted + (chapter.lasted or 0.0)
            chapters[-1] = replace(chapters[-1], times=chapters[-1].times + 1, lasted=lasted)
        elif len(chapters) < CHAPTERS:
            chapters.append(chapter)
    return chapters


def _chapter(rank: RankTrace, phase: Phase, events: list[Event]) -> Chapter:
    began = rank.moments[phase.enter or 0].clock - rank.moments[0].clock if rank.moments else 0.0
    lasted = None
    if phase.enter is not None and phase.exit is not None:
        lasted = rank.moments[phase.exit].clock - rank.moments[phase.enter].clock
    failed = any(event.kind == "failure" for event in events)
    outcome = "failed" if failed else "open" if phase.ordinal and phase.exit is None else "ok"
    return Chapter(phase.ordinal, phase.name, phase.label, began, lasted, outcome, 1, tuple(events))


def _events(rank: RankTrace) -> Iterator[tuple[Moment, Event]]:
    start = rank.moments[0].clock if rank.moments else 0.0
    moves: dict[tuple[int, str, str], list[Row]] = {}
    for change in rank.transitions():
        if isinstance(change.before, Residency) and isinstance(change.after, Residency):
            old, new = change.before.short(), change.after.short()
            if old != new:
                rows = moves.setdefault((change.moment.index, old, new), [])
                rows += [row for row in change.rows if row.kind in TENSOR_KINDS]
    split = {facts.short() for facts in rank.facts if isinstance(facts, Residency) and facts.split}
    for (index, old, new), rows in moves.items():
        moment = rank.moments[index]
        text = tr("{tensors}: {before} → {after}", tensors=_counted(rows), before=old, after=new)
        kind = "split" if new in split and _lasts(rank, moment, rows) else "move"
        yield moment, Event(moment.clock - start, kind, text, moment.cause)
    moved = {index for index, _, _ in moves}
    for moment in rank.moments:
        if moment.kind == CALL and moment.index not in moved:
            yield moment, Event(moment.clock - start, "call", moment.label, moment.cause)
    for moment in rank.failures:
        if moment.failure is not None:
            text = tr("{operation} raises {error}", operation=moment.failure.operation, error=moment.failure.type)
            yield moment, Event(moment.clock - start, "failure", text, moment.cause)


def _lasts(rank: RankTrace, moment: Moment, rows: list[Row]) -> bool:
    """Whether one of the rows, split at this moment, still is when the phase ends, or met a failure before that."""
    phase = rank.phases.get(moment.phase)
    if phase is None or phase.exit is None or any(failure.phase == moment.phase for failure in rank.failures):
        return True
    facts = rank.state(phase.exit).facts
    at_its_end = (rank.facts[facts[row.id]] for row in rows)
    return any(isinstance(its, Residency) and its.split for its in at_its_end)


def _counted(rows: list[Row]) -> str:
    """``"21 parameters"``; a few under one pattern with their names."""
    kinds: dict[str, dict[str, None]] = {}
    for row in rows:
        kinds.setdefault(row.kind, {})[row.name] = None
    words = []
    for kind, names in kinds.items():
        patterns = compress(names) if len(names) <= 1000 else []
        named = f" ({patterns[0].text})" if len(patterns) == 1 and len(patterns[0].text) <= 60 else ""
        words.append(counted(kind, len(names)) + named)
    return tr(" and ").join(words)
