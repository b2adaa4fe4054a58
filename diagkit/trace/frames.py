"""A trace as a table: a line per rank, moment and tensor. Only `frame` needs pandas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from diagkit.errors import MissingDependency
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import ABSENT, TENSOR_KINDS, Residency

if TYPE_CHECKING:
    import pandas

    from diagkit.trace.merged import Trace

#: Name and type of each column; any but the first two may be empty.
COLUMNS: dict[str, type] = {
    "rank": int, "moment": int, "time": float, "phase": int, "phase_name": str, "label": str, "model": str, "kind": str,
    "name": str, "part": str, "metadata_device": str, "storage_device": str, "pinned": bool, "split": bool,
    "aliased": bool, "registered": bool, "sharded_state": str, "dtype": str, "storage_dtype": str, "generation": int,
    "cause": str,
}  # fmt: skip


def frame(trace: Trace, every: bool = False) -> pandas.DataFrame:
    """One line per rank, moment and tensor that changed there; with ``every`` per tensor that existed there.

    Raises:
        MissingDependency: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingDependency("tables need pandas", remedy="pip install 'diagkit[report]'") from None
    return pandas.DataFrame([line for rank in trace for line in lines(rank, every)], columns=list(COLUMNS))


def lines(rank: RankTrace, every: bool = False) -> Iterator[tuple[Any, ...]]:
    """The lines of one rank, in the order of `COLUMNS`."""
    facts: list[int] = [ABSENT] * len(rank.rows)
    generations = [0] * len(rank.rows)
    for moment in rank.moments:
        before = facts
        if moment.key:
            facts = [ABSENT] * len(before)
        changed: list[int] = []
        for change in moment.changes:
            for number in range(change.start, change.start + change.count):
                if change.facts != before[number] or change.exchanged:
                    changed.append(number)
                generations[number] += change.exchanged
                facts[number] = change.facts
        phase = rank.phases.get(moment.phase)
        head = (rank.rank, moment.index, moment.time, moment.phase, phase.name if phase else "", moment.label)
        cause = str(moment.cause) if moment.cause else None
        for number in range(len(facts)) if every else changed:
            row, its = rank.rows[number], rank.facts[facts[number]]
            if row.kind not in TENSOR_KINDS or not isinstance(its, Residency):
                continue
            yield (
                *head, row.model, row.kind, row.name, row.part,
                its.metadata_device, its.storage_device, its.pinned, its.split, its.aliased, its.registered,
                its.sharded_state, its.dtype, its.storage_dtype, generations[number], cause,
            )  # fmt: skip
