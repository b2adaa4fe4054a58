"""Writes a trace that was read, or redacted, as a trace again: what may be shown can be handed on as it is.

Tables come first and times are those of the moments; what could not be read is not written, and the note about it stays
with the one who read it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import ABSENT, ENTER, EXIT, Change, Moment
from diagkit.trace.writer import MemorySink, TraceWriter, rank_file

__all__ = ["rewrite", "rewritten"]


def rewrite(trace: Trace, folder: Path) -> list[Path]:
    """Writes a ``rank-*.jsonl`` for each rank into the folder, and returns them.

    Raises:
        OSError: one is there already, or cannot be written.
    """
    files = []
    for rank in trace:
        path = rank_file(folder, rank.rank)
        with path.open("xb") as out:
            out.writelines(rewritten(rank))
        files.append(path)
    return files


def rewritten(rank: RankTrace) -> Iterator[bytes]:
    """The lines of one rank."""
    sink = MemorySink()
    writer = TraceWriter(sink, rank.header)
    for _, those in itertools.groupby(rank.rows, lambda row: (row.kind, row.model)):
        rows = list(those)
        writer.table(rows, [rank.local_shapes.get(row.id) for row in rows])
    for trouble in rank.troubles:
        where, _, error = trouble.partition(": ")
        writer.trouble(where, error)
    first = rank.moments[0] if rank.moments else None
    yield from _timed(sink, first)
    begun = {0}
    for moment in rank.moments:
        begins = None
        if moment.phase not in begun and moment.phase in rank.phases:
            phase = rank.phases[moment.phase]
            begun.add(moment.phase)
            begins = {"name": phase.name, "parent": phase.parent, "label": phase.label}
        ends = moment.kind == EXIT or (moment.phase == 0 and moment is rank.moments[-1])
        writer.moment(
            moment.kind, moment.label, moment.phase, list(_changes(rank, moment, writer)), key=moment.key,
            cause=moment.cause, failure=moment.failure, begins=begins,
            calls=rank.phases[moment.phase].calls if ends and moment.kind != ENTER else None,
        )  # fmt: skip
        yield from _timed(sink, moment)
    if rank.ended is not None:
        writer.close(rank.ended)
    yield from _timed(sink, rank.moments[-1] if rank.moments else None)


def _changes(rank: RankTrace, moment: Moment, writer: TraceWriter) -> Iterator[Change]:
    for change in moment.changes:
        facts = rank.facts[change.facts]
        if facts is not None or change.facts == ABSENT:
            number = ABSENT if facts is None else writer.fact_id(facts)
            yield Change(change.start, change.count, number, change.exchanged)


def _timed(sink: MemorySink, moment: Moment | None) -> Iterator[bytes]:
    """What the sink has got, with the times of the moment; the sink is empty again."""
    for line in sink.lines:
        event = json.loads(line)
        if moment is not None:
            event |= {"t": moment.time, "m": moment.clock}
        yield json.dumps(event, separators=(",", ":")).encode("ascii") + b"\n"
    sink.lines.clear()
