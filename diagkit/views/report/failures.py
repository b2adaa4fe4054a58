"""Which exception came first, which came after it, and how each rank's story ended.

The rules: the first failure is told, never the last, since what comes later may merely follow; ranks and phases that
failed alike are one line; a rank that left without a word is told as such, for its silence may be the cause of the
others' noise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diagkit.diagnosis import Findings
from diagkit.diagnosis.signatures import said
from diagkit.language import tr
from diagkit.trace import RankTrace, Trace
from diagkit.trace.partings import steady
from diagkit.trace.schema import Cause, Failure, Moment
from diagkit.trace.values import series

__all__ = ["Fate", "Told", "among", "failures", "fates", "told_rank"]

_INDEX = re.compile(r"(?<=\b[a-z]{3}):\d+\b|(?<=\bcuda):\d+\b|, index=\d+|\brank \d+\b")


@dataclass(frozen=True, slots=True)
class Told:
    """One failure, over all ranks that met it and all phases of one loop.

    ``seconds``: since its rank's trace began, the first time; ``times``: so often on one rank.
    """

    type: str
    message: str
    operation: str
    phase: str
    ranks: tuple[int, ...]
    seconds: float
    cause: Cause | None
    moment: int  # its index on the lowest of the ranks
    times: int = 1

    @property
    def failure(self) -> Failure:
        return Failure(self.type, self.message, self.operation)

    @property
    def kind(self) -> tuple[object, ...]:
        """What it has in common with the same failure of another run."""
        # Paths, sizes and devices in a text differ by run; of a known text nothing but its meaning counts.
        return self.type, said(self.message) or steady(self.message)


def among(others: Iterable[Told]) -> Callable[[Told], bool]:
    """Tells whether a failure is one of these, met in another run: another error in the same phase is none of them."""
    phases: dict[tuple[object, ...], set[str]] = {}
    for other in others:
        phases.setdefault(other.kind, set()).add(series(other.phase))

    def met(told: Told) -> bool:
        known, phase = phases.get(told.kind, set()), series(told.phase)
        return bool(known) and (not phase or not known.isdisjoint({phase, ""}))  # "": it cannot say where

    return met


@dataclass(frozen=True, slots=True)
class Fate:
    """How the traces of some ranks ended: ``how`` is a sentence without its full stop; ``well`` as a run should."""

    ranks: tuple[int, ...]
    how: str
    well: bool


def failures(trace: Trace) -> list[Told]:
    """The failures of a run, the first one first."""
    groups: dict[tuple[object, ...], list[tuple[RankTrace, Moment]]] = {}
    for rank in trace:
        for moment in rank.failures:
            groups.setdefault(_kind(rank, moment), []).append((rank, moment))
    first = trace.first_failure
    kind = _kind(*first) if first else None
    order = sorted(groups.items(), key=lambda group: (group[0] != kind, min((m.phase, m.time) for _, m in group[1])))
    return [_told(members) for _, members in order]


def told_rank(trace: Trace, failed: list[Told], findings: Findings) -> RankTrace:
    """The rank whose story is told: the lowest of those that met the first failure, else of those with the finding to
    blame, else of all."""
    ranks = next((one.ranks for one in (*failed, *findings)), ())
    return next((trace[rank] for rank in ranks if rank in trace.ranks), next(iter(trace)))


def _kind(rank: RankTrace, moment: Moment) -> tuple[object, ...]:
    failure = moment.failure
    if failure is None:
        raise ValueError("a moment without a failure")
    # Ranks differ in the index of their device and in nothing else.
    message = _INDEX.sub("", failure.message)
    return series(rank.phases[moment.phase].name), failure.type, failure.operation, message


def _told(members: list[tuple[RankTrace, Moment]]) -> Told:
    rank, moment = min(members, key=lambda member: (member[0].rank, member[1].index))
    failure = moment.failure
    if failure is None:
        raise ValueError("a moment without a failure")
    return Told(
        failure.type,
        " ".join(failure.message.split()),
        failure.operation,
        rank.phases[moment.phase].name,
        tuple(sorted({one.rank for one, _ in members})),
        moment.clock - rank.moments[0].clock,
        moment.cause,
        moment.index,
        max(Counter(one.rank for one, _ in members).values()),
    )


def fates(trace: Trace) -> list[Fate]:
    """How each rank ended, ranks that ended alike together; those that ended badly first."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank in trace:
        groups.setdefault(_fate(rank), []).append(rank.rank)
    if missing := trace.missing_ranks:
        groups[False, tr("left no trace")] = missing
    return [Fate(tuple(ranks), how, well) for (well, how), ranks in sorted(groups.items(), key=_order)]


def _order(group: tuple[tuple[bool, str], list[int]]) -> tuple[bool, int]:
    (well, _), ranks = group
    return well, ranks[0]


def _fate(rank: RankTrace) -> tuple[bool, str]:
    phase = rank.last_phase.name
    if rank.standstill is not None:
        where = tr("stood still {how_long}", how_long=rank.standstill)
        return False, tr("{what}, in phase {phase}", what=where, phase=phase) if phase else where
    if rank.ended is None:
        last = rank.moments[-1].label if rank.moments else ""
        if phase:
            return False, tr("broke off in phase {phase}, after {moment}", phase=phase, moment=last)
        return False, tr("broke off after {moment}", moment=last) if last else tr("broke off before anything was seen")
    if rank.ended != "closed":
        return False, tr("ended early: {reason}", reason=rank.ended)
    if rank.failures:
        moment = rank.failures[-1]
        failed = moment.failure.type if moment.failure else "?"
        where = rank.phases[moment.phase].name
        if not where:
            return False, tr("failed outside any phase: {error}", error=failed)
        if max(rank.phases) > moment.phase:
            return False, tr("failed in phase {phase}: {error}, and went on", phase=where, error=failed)
        return False, tr("failed in phase {phase}: {error}", phase=where, error=failed)
    return True, tr("ended as a run should")
