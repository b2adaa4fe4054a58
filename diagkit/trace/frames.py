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
    before: list[int] = [ABSENT] * len(rank.rows)
    generations = [0] * len(rank.rows)
    for moment in rank.moments:
        state = rank.state(moment)
        phase = rank.phases.get(moment.phase)
        head = (rank.rank, moment.index, moment.time, moment.phase, phase.name if phase else "", moment.label)
        cause = str(moment.cause) if moment.cause else None
        for row in rank.rows:
            number = state.facts[row.id]
            generation = state.generations[row.id]
            changed = number != before[row.id] or generation != generations[row.id]
            facts = rank.facts[number]
            if row.kind not in TENSOR_KINDS or not isinstance(facts, Residency) or not (changed or every):
                continue
            yield (
                *head, row.model, row.kind, row.name, row.part,
                facts.metadata_device, facts.storage_device, facts.pinned, facts.split, facts.aliased, facts.registered,
                facts.sharded_state, facts.dtype, facts.storage_dtype, generation, cause,
            )  # fmt: skip
        before, generations = state.facts, state.generations
