"""When a state is judged.

A split for a moment, inside an initialisation or between two halves of one operation, is how engines work and no
fault. A state is judged

* where a phase that nothing contains ends, or begins on a model that is already there (`init` and `load` may begin
on anything);
* where an exception passed: here only hazards count whose text it carries, since what was on its way may still arrive;
* at the end of a trace that did not break off inside a phase; a live look is a trace that ends at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diagkit.trace import RankTrace
from diagkit.trace.schema import ENTER, EXIT, FAILURE, MARK, Moment

#: Phases that may begin on a model without bytes, or on one that is still being put together.
BEGINNERS = frozenset({"init", "load"})


@dataclass(frozen=True, slots=True)
class Judged:
    """A moment at which a rank's state is judged, and why."""

    moment: Moment
    why: str  # "begins", "ends", "failed", "last"
    resting: bool  # False: an exception is on its way, so only what it speaks of counts


def is_look(trace: RankTrace) -> bool:
    """Whether this is a look at a live model rather than a recording: nothing but marks, outside any phase."""
    return all(moment.kind == MARK and moment.phase == 0 for moment in trace.moments)


def judged_moments(trace: RankTrace) -> Iterator[Judged]:
    """The moments of a rank at which its state is judged, in order."""
    last = trace.moments[-1].index if trace.moments else -1
    for moment in trace.moments:
        phase = trace.phases.get(moment.phase)
        outermost = phase is None or phase.parent == 0
        if moment.kind == FAILURE or moment.failure is not None:
            yield Judged(moment, "failed", resting=False)
        if moment.kind == EXIT and outermost:
            yield Judged(moment, "ends", resting=True)
        elif moment.kind == ENTER and outermost and phase is not None and phase.name not in BEGINNERS:
            yield Judged(moment, "begins", resting=True)
        elif moment.index == last and (moment.phase == 0 or phase is None):
            yield Judged(moment, "last", resting=True)
