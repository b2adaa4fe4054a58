"""Which trace and which rank of it a figure is about, whatever a caller has in hand."""

from __future__ import annotations

import os

from diagkit.errors import UsageError
from diagkit.trace.merged import Trace, open_trace
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import Moment

__all__ = ["Source", "one_rank", "opened"]

#: A trace, one rank of it, the path of one, or what `inspect` returned.
Source = Trace | RankTrace | str | os.PathLike[str]


def opened(thing: object) -> Trace | RankTrace:
    if isinstance(thing, (Trace, RankTrace)):
        return thing
    if isinstance(thing, (str, os.PathLike)):
        return open_trace(thing)
    if isinstance(held := getattr(thing, "trace", None), RankTrace):  # an inspection
        return held
    raise UsageError(
        "no trace to draw",
        found=type(thing).__name__,
        expected="a trace, an inspection or a path",
        remedy="Pass dk.open_trace(PATH)",
    )


def one_rank(trace: Trace | RankTrace, rank: int | None) -> RankTrace:
    if isinstance(trace, RankTrace):
        if rank not in (None, trace.rank):
            raise UsageError("this is the trace of one rank", found=f"rank={rank}", expected=f"rank {trace.rank}")
        return trace
    if rank is not None:
        return trace[rank]
    failure = trace.first_failure
    if failure is None:
        return next(iter(trace))
    # Which rank's clock was first is chance: the same run should give the same picture.
    return next((one for one in trace if any(_alike(m, failure[1]) for m in one.moments)), failure[0])


def _alike(moment: Moment, first: Moment) -> bool:
    """Whether it is the same failure, on whatever rank."""
    mine, its = moment.failure, first.failure
    if mine is None or its is None or moment.phase != first.phase:
        return False
    return (mine.type, mine.operation) == (its.type, its.operation)
