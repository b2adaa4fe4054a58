"""A trace as a pandas table. The one module of this room that needs pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diagkit.errors import MissingDependency
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import ABSENT, TENSOR_KINDS, Residency

if TYPE_CHECKING:
    import pandas

    from diagkit.trace.merged import Trace

COLUMNS = (
    "rank", "moment", "time", "phase", "phase_name", "label", "model", "kind", "name", "part",
    "metadata_device", "storage_device", "pinned", "split", "aliased", "registered", "sharded_state",
    "dtype", "storage_dtype", "generation", "cause",
)  # fmt: skip


def frame(trace: Trace, every: bool = False) -> pandas.DataFrame:
    """One line per rank, moment and tensor that changed there; with ``every`` per tensor that existed there.

    Raises:
        MissingDependency: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingDependency("tables need pandas", remedy="pip install 'diagkit[report]'") from None
    lines: list[tuple[Any, ...]] = []
    for rank in trace:
        lines += _lines(rank, every)
    return pandas.DataFrame(lines, columns=list(COLUMNS))


def _lines(rank: RankTrace, every: bool) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = []
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
            lines.append((
                *head, row.model, row.kind, row.name, row.part,
                facts.metadata_device, facts.storage_device, facts.pinned, facts.split, facts.aliased, facts.registered,
                facts.sharded_state, facts.dtype, facts.storage_dtype, generation, cause,
            ))  # fmt: skip
        before, generations = state.facts, state.generations
    return lines
