"""A trace in a few lines of plain text: what moved, when, and whose line moved it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from diagkit.trace.patterns import compress
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import TENSOR_KINDS, Moment, Residency
from diagkit.trace.values import clip, printable, series

#: Lines told, and characters of one.
LINES, WIDTH = 12, 200


def summary(rank: RankTrace, lines: int = LINES) -> list[str]:
    """What happened on one rank, in order; what happens again and again is told once, with its count."""
    told: dict[tuple[int, str], int] = {}
    first: dict[str, int] = {}  # of phases that are steps of one loop: the hundredth is told with the first
    for ordinal, phase in rank.phases.items():
        first.setdefault(series(phase.name), ordinal)
    for moment, text in sorted(_events(rank), key=lambda event: event[0].index):
        name = rank.phases[moment.phase].name if moment.phase in rank.phases else ""
        key = (first.get(series(name), 0), text)
        told[key] = told.get(key, 0) + 1
    found = []
    for (ordinal, text), times in told.items():
        where = rank.phases[ordinal].name if ordinal in rank.phases else ""
        again = f", {times} times" if times > 1 else ""
        found.append(printable(clip(f"{where or 'outside any phase'}: {text}", WIDTH - len(again)) + again))
    if len(found) > lines:
        return [*found[: lines - 1], f"and {len(found) - lines + 1} more: trace.frame() has them all"]
    return found or ["nothing moved"]


def _events(rank: RankTrace) -> Iterator[tuple[Moment, str]]:
    groups: dict[tuple[int, str, str], list[tuple[str, str]]] = {}
    for change in rank.transitions():
        if isinstance(change.before, Residency) and isinstance(change.after, Residency):
            old, new = change.before.short(), change.after.short()
            if old != new:
                rows = groups.setdefault((change.moment.index, old, new), [])
                rows += [(row.kind, row.name) for row in change.rows if row.kind in TENSOR_KINDS]
    for (index, old, new), rows in groups.items():
        moment = rank.moments[index]
        yield moment, f"{_counted(rows)} {old} -> {new} by {moment.cause or moment.label}"
    for moment in rank.failures:
        failure = moment.failure
        if failure is not None:
            where = f" at {moment.cause.frame}" if moment.cause and moment.cause.frame else ""
            yield moment, f"{failure.operation} failed{where}: {failure.type}: {' '.join(failure.message.split())}"


def _counted(rows: Iterable[tuple[str, str]]) -> str:
    """``"21 parameters"``, or the one name that a few have in common."""
    counts: dict[str, dict[str, None]] = {}
    for kind, name in rows:
        counts.setdefault(kind, {})[name] = None
    words = []
    for kind, names in counts.items():
        patterns = compress(names) if len(names) <= 1000 else []
        noun = kind.replace("_", " ")
        if len(patterns) == 1 and len(patterns[0].text) <= 60:
            words.append(f"{noun} {patterns[0]}")
        else:
            words.append(f"{len(names):,} {noun}s")
    return " and ".join(words)
