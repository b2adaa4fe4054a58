"""Where two recordings of one rank part: the first step after which residencies differ.

The rules: steps are matched by the phases that surround them (ordinal and name), never by clocks; failures by type,
operation and message, less what differs by run in it (devices, numbers, addresses, paths); calls that changed
nothing are no steps, so a call that one run made and the other did not counts only if something moved; a device is
compared as "the rank's own accelerator", whatever its type and index; once the runs have parted, what follows is
consequence and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from diagkit.language import msg, tr
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import (
    ABSENT,
    BUFFER,
    ENTER,
    EXIT,
    GROUP,
    PARAMETER,
    Facts,
    GroupFacts,
    Header,
    Moment,
    Phase,
    Residency,
    Row,
    device_type,
)

__all__ = ["Alignment", "Parted", "Walk", "align", "failed", "steady"]

OWN = "accelerator"
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|:?\d[\d.,]*")
Key = tuple[str, str, str, str, int]


@dataclass(slots=True)
class Alignment:
    """Which row of one run is which of the other.

    ``first`` and ``second`` are row numbers side by side, -1 where there is none; None where the tables are the same.
    """

    rows: Sequence[Row]  # the compared rows, named by the first run that has them
    first: list[int] | None = None
    second: list[int] | None = None
    only_first: list[Row] = field(default_factory=list)  # parts of the model that the other one does not have
    only_second: list[Row] = field(default_factory=list)
    reshaped: list[Row] = field(default_factory=list)  # there in both, with another global shape
    #: Row numbers of either run that are not compared: those parts, and what belongs to them.
    left_out: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))


def align(first: Sequence[Row], second: Sequence[Row]) -> Alignment:
    """Matches rows by kind, model, name and part.

    What only one run ever had and is no part of the model (optimizer state, gradients, exports) is compared with its
    absence.
    """
    if first == second:
        return Alignment(first)
    ours, theirs = dict(_keyed(first)), dict(_keyed(second))
    found = Alignment([], [], [])
    rows: list[Row] = []
    alone: set[tuple[str, str]] = set()  # model and name of parameters that only one of the two has
    assert found.first is not None and found.second is not None
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key), theirs.get(key)
        if a is not None and b is not None:
            if a.shape != b.shape:
                found.reshaped.append(a)
        else:
            row = a or b
            assert row is not None
            part = row.kind in (PARAMETER, BUFFER, GROUP)
            if part:
                alone.add((row.model, row.name))
                (found.only_second if a is None else found.only_first).append(row)
            if part or (row.model, row.name) in alone:
                found.left_out[a is None].add(row.id)
                continue
        rows.append(a or b)  # type: ignore[arg-type]
        found.first.append(-1 if a is None else a.id)
        found.second.append(-1 if b is None else b.id)
    found.rows = rows
    return found


def _keyed(rows: Sequence[Row]) -> Iterator[tuple[Key, Row]]:
    seen: dict[tuple[str, str, str, str], int] = {}
    for row in rows:
        key = (row.kind, row.model, row.name, row.part)
        seen[key] = seen.get(key, 0) + 1
        yield (*key, seen[key]), row


@dataclass(slots=True)
class Parted:
    """The place where they parted. A moment is None where that run did nothing more before the phase's next edge."""

    phase: Phase
    first: Moment | None
    second: Moment | None
    edges: tuple[str, str]  # what each run came to next: "phase save ended"
    differs: list[tuple[int, Facts | None, Facts | None]]  # position in the alignment's rows, facts of either run


class Walk:
    """Walks pairs of ranks.

    ``kinds`` are the records that are compared, ``edges_only`` leaves out what only a detailed recording shows,
    ``loose`` what depends on the world size; ``values`` says whether digests of values are compared, too.
    """

    def __init__(
        self, kinds: tuple[type[Facts], ...], edges_only: bool = False, loose: bool = False, values: bool = True
    ) -> None:
        self._kinds = kinds
        self._edges_only = edges_only
        self._loose = loose
        self._values = values
        self._numbers: dict[Facts, int] = {}

    def parted(self, first: RankTrace, second: RankTrace, rows: Alignment) -> Parted | None:
        """Where the two part; None where they never do."""
        ours = _Steps(first, self._meanings(first), rows.left_out[0], self._edges_only)
        theirs = _Steps(second, self._meanings(second), rows.left_out[1], self._edges_only)
        while True:
            a, b = ours.advance(), theirs.advance()
            differs = self._differing(ours, theirs, rows)
            if (
                differs
                or failed(a, first.header) != failed(b, second.header)
                or (a is None and b is None and ours.edge != theirs.edge)
            ):
                if self._edges_only:
                    a, b = ours.latest, theirs.latest
                return Parted(ours.phase, a, b, (ours.next_text, theirs.next_text), differs)
            if a is None and b is None:
                if ours.edge is None:
                    return None
                ours.cross()
                theirs.cross()

    def _differing(self, ours: _Steps, theirs: _Steps, rows: Alignment) -> list[tuple[int, Facts | None, Facts | None]]:
        def picked(steps: _Steps, numbers: list[int] | None) -> list[int]:
            if numbers is None:
                return steps.state
            return [steps.state[n] if n >= 0 else ABSENT for n in numbers]

        mine, other = picked(ours, rows.first), picked(theirs, rows.second)
        if mine == other:
            return []
        found = []
        for at, (a, b) in enumerate(zip(mine, other, strict=True)):
            if a != b:
                found.append((at, ours.facts_at(rows.first, at), theirs.facts_at(rows.second, at)))
        return found

    def _meanings(self, rank: RankTrace) -> list[int]:
        """For each number of facts of this rank, a number that equal meanings share over ranks and runs."""
        found = []
        for facts in rank.facts:
            if not isinstance(facts, self._kinds):
                found.append(ABSENT)
            else:
                meaning = _meaning(facts, rank.header, self._loose, self._values)
                found.append(self._numbers.setdefault(meaning, len(self._numbers) + 1))
        return found


class _Steps:
    """One rank's changes, step by step, up to the next edge of a phase."""

    def __init__(self, rank: RankTrace, meanings: list[int], ignored: set[int], edges_only: bool) -> None:
        self._rank = rank
        self._meanings = meanings
        self._ignored = ignored  # rows that the other run does not have
        self._edges_only = edges_only
        self._at = 0
        self._last = rank.living
        self.latest: Moment | None = None  # the last change since the last edge
        self.state = [ABSENT] * len(rank.rows)
        self._numbers = [ABSENT] * len(rank.rows)
        self.phase = rank.phases[0]

    @property
    def edge(self) -> tuple[str, int, str] | None:
        """The edge ahead: which phase begins or ends there; None at the end of the trace."""
        moment = self._ahead
        return None if moment is None else (moment.kind, moment.phase, self._rank.phases[moment.phase].name)

    @property
    def next_text(self) -> str:
        edge = self.edge
        if edge is None:
            return tr("the trace ended") if self._rank.ended else tr("the trace was cut off")
        text = msg("phase {name} began") if edge[0] == ENTER else msg("phase {name} ended")
        return tr(text, name=edge[2] or edge[1])

    @property
    def _ahead(self) -> Moment | None:
        # What died with the process, at the very end, is no difference.
        return self._rank.moments[self._at] if self._at <= self._last else None

    def advance(self) -> Moment | None:
        """The next moment before the edge that changed something or failed; None where the edge is reached."""
        while (moment := self._ahead) is not None and moment.kind not in (ENTER, EXIT):
            changed = self._apply(moment)
            self._at += 1
            if not self._edges_only and (changed or moment.failure is not None):
                return moment
        # What was found at the edge belongs to what came before it.
        changed = moment is not None and self._apply(moment)
        return moment if changed and not self._edges_only else None

    def cross(self) -> None:
        """Goes over the edge."""
        moment = self._ahead
        if moment is not None:
            phases = self._rank.phases
            phase = phases[moment.phase]
            self.phase = phase if moment.kind == ENTER else phases.get(phase.parent, phases[0])
            self._at += 1
            self.latest = None

    def facts_at(self, numbers: list[int] | None, at: int) -> Facts | None:
        row = at if numbers is None else numbers[at]
        return self._rank.facts[self._numbers[row]] if row >= 0 else None

    def _apply(self, moment: Moment) -> bool:
        """Whether the moment changed what the facts mean."""
        before = self.state.copy() if moment.key or self._ignored else None
        if moment.key:
            self.state = [ABSENT] * len(self.state)
            self._numbers = [ABSENT] * len(self._numbers)
        changed = False
        for change in moment.changes:
            end = change.start + change.count
            new = [self._meanings[change.facts]] * change.count
            changed = changed or (before is None and self.state[change.start : end] != new)
            self.state[change.start : end] = new
            self._numbers[change.start : end] = [change.facts] * change.count
        if before is not None:
            for row in self._ignored:
                self.state[row] = ABSENT
            changed = before != self.state
        if changed:
            self.latest = moment
        return changed


def failed(moment: Moment | None, header: Header) -> tuple[str, str, str] | None:
    """What a moment's failure has in common with the same one in another run or on another rank; None: none."""
    failure = moment.failure if moment else None
    if failure is None:
        return None
    return failure.type, failure.operation, steady(re.sub(rf"\b{re.escape(header.device)}\b", OWN, failure.message))


def steady(message: str) -> str:
    """What stays the same in a failure's message from run to run: all but paths, indices, addresses and numbers."""
    words = [_NUMBER.sub("", word) for word in message.split() if "/" not in word and "\\" not in word]
    return " ".join(filter(None, words))


def _meaning(facts: Facts, header: Header, loose: bool, values: bool) -> Facts:
    changes: dict[str, object] = {}
    for f in fields(facts):
        if f.name == "device" or f.name.endswith("_device"):
            changes[f.name] = _own(getattr(facts, f.name), header)
    if isinstance(facts, GroupFacts):
        # Which backends there are is told beside the comparison, once for the whole run.
        changes |= {"mesh": facts.mesh.replace(header.device, OWN), "backends": ""}
    if loose and isinstance(facts, Residency):
        changes["empty"] = False
    if not values and isinstance(facts, Residency):
        changes["digest"] = None
    return replace(facts, **changes)  # type: ignore[arg-type]


def _own(device: str | None, header: Header) -> str | None:
    if device is None or header.device == "cpu" or device_type(device) != header.device:
        return device
    index = device.partition(":")[2]
    return OWN if index in ("", str(header.device_index)) else f"{OWN}:{index}"
