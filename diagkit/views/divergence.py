"""Which ranks are alike at a moment, and which are not: ranks in one state are one group.

The rules: the index of a device is set aside, for every rank has its own; ranks meet at the same place of the same
phase, never at the same time of their clocks; a rank that never got there is shown where it ended, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diagkit.errors import UsageError
from diagkit.language import msg, tr
from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import Facts, Moment, Residency, Row, device_type
from diagkit.views.scene import clean
from diagkit.views.story import Cell, Tensor, cell_of

__all__ = ["Divergence", "Group", "Place", "counterpart", "diverge"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks in one state; ``state[i]`` is the number of the cell of tensor ``i``."""

    ranks: tuple[int, ...]
    state: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """``groups`` with the most ranks first; ``missing`` ranks left no trace, ``unrecorded`` ones were left out on
    purpose, and ``ended`` says of a rank that never got to the moment where it ended.
    """

    tensors: tuple[Tensor, ...]
    cells: tuple[Cell | None, ...]
    groups: tuple[Group, ...]
    missing: tuple[int, ...]
    unrecorded: tuple[int, ...]
    ended: dict[int, str]
    moment: str

    @property
    def differing(self) -> list[int]:
        """The tensors that are not everywhere alike."""
        states = [group.state for group in self.groups]
        return [i for i, numbers in enumerate(zip(*states, strict=True)) if len(set(numbers)) > 1]


def diverge(trace: Trace, moment: int | str | Moment | None, kinds: Iterable[str]) -> Divergence:
    """All ranks of a trace at one moment: a moment of its lowest rank or its index, the end of a phase by its name, or
    the last of every rank.

    Raises:
        UsageError: no such moment or phase, or nothing to show.
    """
    wanted = frozenset(kinds)
    tables: list[tuple[list[Row], list[int]]] = []  # distinct tables of rows, and which tensor each of their rows is
    tensors: dict[Tensor, int] = {}
    cells: dict[Cell | None, int] = {None: 0}
    states: dict[tuple[int, ...], list[int]] = {}
    ended: dict[int, str] = {}
    place, name = _place(trace, moment)
    for rank in trace:
        at = counterpart(rank, place)
        if rank.ended is None and (at is None or at.index == len(rank.moments) - 1):
            phase = clean(rank.last_phase.name)
            ended[rank.rank] = tr("cut off in {phase}", phase=phase) if phase else tr("cut off")
        numbers = [cells.setdefault(_cell(fact), len(cells)) for fact in rank.facts]
        facts = rank.state(at).facts if at is not None else []
        columns = _columns(rank.rows, tables, tensors, wanted)
        state = [0] * len(tensors)
        for row, fact in enumerate(facts):
            if columns[row] >= 0:
                state[columns[row]] = numbers[fact]
        states.setdefault(tuple(state), []).append(rank.rank)
    if not tensors:
        raise UsageError("nothing to show", found=f"no {' or '.join(sorted(wanted))}", where=trace.path)
    full: dict[tuple[int, ...], list[int]] = {}
    for known, ranks in states.items():  # ranks that came before a tensor was first named do not have it
        full.setdefault(known + (0,) * (len(tensors) - len(known)), []).extend(ranks)
    groups = [Group(tuple(sorted(ranks)), known) for known, ranks in full.items()]
    groups.sort(key=lambda group: (-len(group.ranks), group.ranks))
    missing, unrecorded = tuple(trace.missing_ranks), tuple(trace.left_out)
    return Divergence(tuple(tensors), tuple(cells), tuple(groups), missing, unrecorded, ended, name)


def _cell(facts: Facts | None) -> Cell | None:
    if not isinstance(facts, Residency):
        return None
    cell = cell_of(facts)
    return replace(cell, metadata=device_type(cell.metadata) or "", storage=device_type(cell.storage))


def _columns(
    rows: list[Row], tables: list[tuple[list[Row], list[int]]], tensors: dict[Tensor, int], wanted: frozenset[str]
) -> list[int]:
    """Which tensor each row is, -1 for none. Ranks share their rows, so comparing tables costs next to nothing."""
    for known, columns in tables:
        if known == rows:
            return columns
    columns = [
        tensors.setdefault((row.kind, row.model, row.name, row.part), len(tensors)) if row.kind in wanted else -1
        for row in rows
    ]
    tables.append((rows, columns))
    return columns


@dataclass(frozen=True, slots=True)
class Place:
    """The ``nth`` moment of a kind and label in a phase; in a phase of that name, its last moment."""

    phase: int | str
    kind: str = ""
    label: str = ""
    nth: int = 0

    @classmethod
    def of(cls, rank: RankTrace, moment: Moment) -> Place:
        """The place of one of the rank's moments."""
        alike = [m.index for m in rank.moments if _named(m) == _named(moment)]
        return cls(*_named(moment), alike.index(moment.index))


def _place(trace: Trace, moment: int | str | Moment | None) -> tuple[Place | None, str]:
    """Where the ranks are compared, and its name."""
    first = next(iter(trace))
    if moment is None:
        return None, msg("the last moment of every rank")
    if isinstance(moment, str):
        if not any(phase.name == moment for rank in trace for phase in rank.phases.values()):
            names = ", ".join(dict.fromkeys(p.name for p in first.phases.values() if p.name))
            raise UsageError("no such phase in this trace", found=moment, expected=f"one of {names}" if names else None)
        return Place(moment), tr("the end of {phase}", phase=clean(moment))
    index = moment if isinstance(moment, int) else moment.index
    if not -len(first.moments) <= index < len(first.moments):
        raise UsageError("no such moment in this trace", found=index, expected=f"0 to {len(first.moments) - 1}")
    here = first.moments[index]
    return Place.of(first, here), f"“{clean(here.label)}”"


def _named(moment: Moment) -> tuple[int, str, str]:
    return moment.phase, moment.kind, moment.label


def counterpart(rank: RankTrace, place: Place | None) -> Moment | None:
    """This rank's moment at that place, or its last one before; None where it has none."""
    moments: Sequence[Moment] = rank.moments
    if place is not None and isinstance(place.phase, str):
        inside = [m for m in moments if rank.phases.get(m.phase, rank.phases[0]).name == place.phase]
        return inside[-1] if inside else moments[-1] if moments else None
    if place is not None and isinstance(place.phase, int):
        alike = [m for m in moments if _named(m) == (place.phase, place.kind, place.label)]
        if place.nth < len(alike):
            return alike[place.nth]
        # Outside any phase (0) is before as well as after them.
        past = next((m.index for m in moments if place.phase and m.phase > place.phase), len(moments))
        moments = [m for m in moments[:past] if m.phase == place.phase] or moments[:past]
    return moments[-1] if moments else None
