"""Reads one rank's trace, whatever state it is in.

The rules: a damaged, unknown or absurd line costs that line and is told in ``problems``; nothing is trusted (types,
ranges, numbers of rows); memory follows the file, never a number in it; only a path that holds no trace at all
raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diagkit.trace.schema import (
    ABSENT,
    ENTER,
    EXIT,
    KINDS,
    MOMENT_KINDS,
    SCHEMA_VERSION,
    Cause,
    Change,
    Facts,
    Failure,
    Frame,
    Header,
    Moment,
    Phase,
    Row,
    facts_from_json,
)

#: No line of ours is longer; a longer one is skipped unread.
LINE_LIMIT = 64 << 20
#: No more rows than this in one trace.
ROW_LIMIT = 5_000_000
PROBLEM_LIMIT = 50

_TABLE_HASH = re.compile(rb'"ev":"table",.{0,200}?"hash":"([0-9a-f]{8,64})"')


class Malformed(ValueError):
    """One event cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Transition:
    """Some rows went from one residency to another at a moment, all alike."""

    moment: Moment
    rows: tuple[Row, ...]
    before: Facts | None
    after: Facts | None
    exchanged: bool

    @property
    def cause(self) -> Cause | None:
        return self.moment.cause


@dataclass(slots=True)
class State:
    """Right after a moment: of each row the number of its facts (`ABSENT`: not there) and its storage generation."""

    facts: list[int]
    generations: list[int]


@dataclass(slots=True)
class TableCache:
    """Tables already parsed, by hash; shared between the ranks of one run."""

    rows: dict[bytes, list[Row]] = field(default_factory=dict)


class RankTrace:
    """What one rank left behind.

    ``rows``, ``facts`` (number -> record, None for 0), ``moments``, ``phases`` (ordinal -> phase, 0 is "outside any
    phase"), ``local_shapes`` (row id -> shape on this rank), ``troubles`` (faults the recorder told of),
    ``problems`` (what could not be read), ``ended`` (the reason of the closing line, None for a trace that was cut
    off).
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.header = Header()
        self.rows: list[Row] = []
        self.local_shapes: dict[int, tuple[int, ...] | None] = {}
        self.facts: list[Facts | None] = [None]
        self.causes: dict[int, Cause] = {}
        self.moments: list[Moment] = []
        self.phases: dict[int, Phase] = {0: Phase(0, "")}
        self.troubles: list[str] = []
        self.problems: list[str] = []
        self.ended: str | None = None
        self._facts_of: dict[int, int] = {}  # number in the file -> index in `facts`
        self._last: tuple[int, State] | None = None

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def failures(self) -> list[Moment]:
        """Moments at which an exception was seen, in order."""
        return [moment for moment in self.moments if moment.failure is not None]

    @property
    def last_phase(self) -> Phase:
        """The innermost phase that was open when the trace ended; ordinal 0 where none was."""
        open_phases = [p for p in self.phases.values() if p.ordinal and p.enter is not None and p.exit is None]
        return open_phases[-1] if open_phases else self.phases[0]

    def state(self, moment: int | Moment) -> State:
        """The state right after a moment. Reading forward is cheap; going back replays from the beginning."""
        index = range(len(self.moments))[moment if isinstance(moment, int) else moment.index]
        start, state = -1, State([], [])
        if self._last is not None and self._last[0] <= index:
            start, last = self._last
            state = State(last.facts.copy(), last.generations.copy())
        for at in range(start + 1, index + 1):
            self._replay(self.moments[at], state)
        missing = len(self.rows) - len(state.facts)
        state.facts.extend([ABSENT] * missing)
        state.generations.extend([0] * (len(self.rows) - len(state.generations)))
        self._last = (index, State(state.facts.copy(), state.generations.copy()))
        return state

    def _replay(self, moment: Moment, state: State) -> None:
        if moment.key:
            state.facts = [ABSENT] * len(state.facts)
        for change in moment.changes:
            end = change.start + change.count
            if end > len(state.facts):
                state.facts.extend([ABSENT] * (end - len(state.facts)))
            state.facts[change.start : end] = [change.facts] * change.count
            if end > len(state.generations):
                state.generations.extend([0] * (end - len(state.generations)))
            if change.exchanged:
                for row in range(change.start, end):
                    state.generations[row] += 1

    def transitions(self) -> Iterator[Transition]:
        """Every change of a row that existed before and after, in order; the rows that changed alike together."""
        facts: list[int] = [ABSENT] * len(self.rows)
        for moment in self.moments:
            groups: dict[tuple[int, int, bool], list[Row]] = {}
            touched: set[int] = set()
            for change in moment.changes:
                for row in range(change.start, change.start + change.count):
                    before, facts[row] = facts[row], change.facts
                    touched.add(row)
                    if (before != change.facts or change.exchanged) and before != ABSENT and change.facts != ABSENT:
                        groups.setdefault((before, change.facts, change.exchanged), []).append(self.rows[row])
            if moment.key:
                for row in range(len(facts)):
                    if row not in touched:
                        facts[row] = ABSENT
            for (old, new, exchanged), rows in groups.items():
                yield Transition(moment, tuple(rows), self.facts[old], self.facts[new], exchanged)

    def row(self, name: str, kind: str = "parameter", part: str = "", model: str | None = None) -> Row:
        """The row of that name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name and row.kind == kind and (not part or row.part == part) and model in (None, row.model):
                return row
        raise KeyError(f"no {kind} named {name!r} in the trace of rank {self.rank}")

    def _problem(self, text: str) -> None:
        if len(self.problems) < PROBLEM_LIMIT:
            self.problems.append(text)
        elif len(self.problems) == PROBLEM_LIMIT:
            self.problems.append("further problems are not listed")


def read_rank(lines: Iterable[bytes], path: Path | None = None, cache: TableCache | None = None) -> RankTrace:
    """The trace in these lines, as far as they can be read."""
    trace = RankTrace(path)
    builder = _Builder(trace, cache or TableCache())
    expected = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not line.endswith(b"\n"):
                raise Malformed("the line is not finished (the process ended while writing it, or is still writing)")
            seq = builder.line(line)
        except (Malformed, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            trace._problem(f"line {number}: {_clip(str(error) or type(error).__name__)}; skipped")
            continue
        if seq > expected:
            trace._problem(f"line {number}: {seq - expected} event(s) before it are missing")
        elif seq < expected:
            trace._problem(f"line {number}: event {seq} comes again or late")
        expected = max(expected, seq + 1)
    builder.finish()
    return trace


def read_file(path: Path, cache: TableCache | None = None) -> RankTrace:
    """The trace in one rank's file.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        return read_rank(_bounded_lines(file), path, cache)


def _bounded_lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(LINE_LIMIT):
        if len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            while (rest := file.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
                pass
            yield b"(a line of more than 64 MiB)\n"
        else:
            yield line


class _Builder:
    """Turns events into a RankTrace."""

    def __init__(self, trace: RankTrace, cache: TableCache) -> None:
        self.trace = trace
        self.cache = cache
        self.seen_header = False

    def line(self, line: bytes) -> int:
        known = _TABLE_HASH.search(line, 0, 400)
        if known and (rows := self.cache.rows.get(known[1])) is not None and rows[0].id == len(self.trace.rows):
            self.trace.rows.extend(rows)
            number = re.search(rb'"seq":(\d{1,15})', line[:100])
            return int(number[1]) if number else 0
        event = json.loads(line)
        if not isinstance(event, dict):
            raise Malformed(f"expected an object, found {type(event).__name__}")
        seq = _int(event, "seq")
        handler = getattr(self, f"on_{event.get('ev')}", None) if event.get("ev") in _EVENTS else None
        if handler is None:
            raise Malformed(f"unknown event {_clip(repr(event.get('ev')))}")
        if not self.seen_header and event["ev"] != "header":
            self.trace._problem("the header is missing")
            self.seen_header = True
        handler(event)
        return seq

    def on_header(self, event: Mapping[str, Any]) -> None:
        if self.seen_header:
            raise Malformed("a second header")
        self.seen_header = True
        known = {f.name: f for f in fields(Header)}
        values: dict[str, Any] = {}
        for name, f in known.items():
            value = event.get(name, f.default)
            if name == "argv":
                value = tuple(str(v) for v in value) if isinstance(value, list) else ()
            elif name == "job":
                value = value if isinstance(value, dict) else {}
            elif isinstance(f.default, bool):
                value = value is True
            elif isinstance(f.default, int):
                value = (
                    value
                    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
                    else f.default
                )
            elif isinstance(f.default, str):
                value = value if isinstance(value, str) else f.default
            else:
                value = value if value is None or isinstance(value, int) else None
            values[name] = value
        if values["schema"] != SCHEMA_VERSION:
            self.trace._problem(
                f"schema {values['schema']}, this diagkit reads {SCHEMA_VERSION}: what it does not know is left out"
            )
        self.trace.header = Header(**values)

    def on_table(self, event: Mapping[str, Any]) -> None:
        rows = self.trace.rows
        base, names = _int(event, "base"), _list(event, "names")
        if base != len(rows):
            raise Malformed(f"a table that starts at row {base}, expected {len(rows)}")
        if len(rows) + len(names) > ROW_LIMIT:
            raise Malformed(f"more than {ROW_LIMIT} rows")
        kind, model = event.get("kind"), event.get("model")
        if kind not in KINDS or not isinstance(model, str):
            raise Malformed(f"a table of unknown kind {_clip(repr(kind))}")
        count = len(names)
        parts = _list(event, "parts", [""] * count)
        owners = _list(event, "of", [None] * count)
        shapes = _expand(event.get("shapes"), count)
        if not len(parts) == len(owners) == len(shapes) == count or not all(
            isinstance(n, str) for n in (*names, *parts)
        ):
            raise Malformed("a table whose columns do not fit each other")
        new = [
            Row(
                base + i,
                kind,
                model,
                names[i],
                parts[i],
                shapes[i],
                owners[i] if isinstance(owners[i], int) and 0 <= owners[i] < base else None,
            )
            for i in range(count)
        ]
        digest = event.get("hash")
        if isinstance(digest, str) and new:
            self.cache.rows.setdefault(digest.encode("utf-8", "replace"), new)
        rows.extend(new)

    def on_local(self, event: Mapping[str, Any]) -> None:
        base = _int(event, "base")
        shapes = _expand(event.get("shapes"), len(self.trace.rows) - base)
        self.trace.local_shapes.update({base + i: shape for i, shape in enumerate(shapes)})

    def on_moment(self, event: Mapping[str, Any]) -> None:
        trace = self.trace
        for number, data in _dict(event, "facts").items():
            try:
                facts: Facts | None = facts_from_json(data)
            except (ValueError, TypeError, AttributeError) as error:
                trace._problem(f"facts {_clip(number)}: {_clip(str(error))}")
                facts = None
            trace.facts.append(facts)
            trace._facts_of[int(number)] = len(trace.facts) - 1
        for number, data in _dict(event, "causes").items():
            trace.causes[int(number)] = _cause(data)
        kind = event.get("kind")
        if kind not in MOMENT_KINDS:
            raise Malformed(f"a moment of unknown kind {_clip(repr(kind))}")
        changes = self._changes(_list(event, "d", []))
        failure = _failure(event["failure"]) if isinstance(event.get("failure"), dict) else None
        ordinal = _int(event, "ph")
        moment = Moment(
            index=len(trace.moments),
            seq=_int(event, "seq"),
            time=_float(event, "t"),
            clock=_float(event, "m"),
            phase=ordinal,
            kind=kind,
            label=_clip(str(event.get("label", "")), 500),
            changes=changes,
            cause=trace.causes.get(event["cause"]) if isinstance(event.get("cause"), int) else None,
            failure=failure,
            key=event.get("key") == 1,
        )
        trace.moments.append(moment)
        self._phase(event, moment)

    def _phase(self, event: Mapping[str, Any], moment: Moment) -> None:
        phases = self.trace.phases
        ordinal = moment.phase
        phase = phases.get(ordinal)
        if phase is None:
            info = _dict(event, "phase")
            parent = info.get("parent")
            phase = Phase(
                ordinal,
                str(info.get("name", "?")),
                parent if isinstance(parent, int) and parent in phases else 0,
                str(info.get("label", "")),
            )
            phases[ordinal] = phase
        if moment.kind == ENTER:
            phase.enter = moment.index
        elif moment.kind == EXIT:
            phase.exit = moment.index
        if moment.failure is not None and ordinal:
            phase.failed = True
        for name, count in _dict(event, "calls").items():
            if isinstance(count, int):
                phase.calls[name] = phase.calls.get(name, 0) + count

    def _changes(self, flat: list[Any]) -> tuple[Change, ...]:
        if len(flat) % 4 or not all(type(n) is int and n >= 0 for n in flat):
            raise Malformed("changes that are not groups of four numbers")
        out = []
        end = 0
        for i in range(0, len(flat), 4):
            gap, count, number, exchanged = flat[i : i + 4]
            start, end = end + gap, end + gap + count
            if end > len(self.trace.rows):
                raise Malformed(f"a change of row {end - 1}, there are {len(self.trace.rows)}")
            if number and number not in self.trace._facts_of:
                raise Malformed(f"facts {number} were never defined")
            out.append(Change(start, count, self.trace._facts_of[number] if number else ABSENT, exchanged == 1))
        return tuple(out)

    def on_trouble(self, event: Mapping[str, Any]) -> None:
        if len(self.trace.troubles) < 1000:
            self.trace.troubles.append(_clip(f"{event.get('where')}: {event.get('error')}", 500))

    def on_end(self, event: Mapping[str, Any]) -> None:
        self.trace.ended = _clip(str(event.get("reason", "closed")))

    def finish(self) -> None:
        trace = self.trace
        if trace.ended is None:
            phase = trace.last_phase
            where = f"in phase {phase.ordinal} ({phase.name})" if phase.ordinal else "outside any phase"
            trace._problem(f"rank {trace.rank} was cut off {where}: no closing line")


_EVENTS = ("header", "table", "local", "moment", "trouble", "end")


def _int(event: Mapping[str, Any], name: str) -> int:
    value = event.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise Malformed(f"{name}: expected a number from 0, found {_clip(repr(value))}")
    return value


def _float(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else 0.0


def _list(event: Mapping[str, Any], name: str, default: list[Any] | None = None) -> list[Any]:
    value = event.get(name, default)
    if not isinstance(value, list):
        raise Malformed(f"{name}: expected a list, found {_clip(repr(value))}")
    return value


def _dict(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def _expand(runs: object, count: int) -> list[tuple[int, ...] | None]:
    """The inverse of the writer's run lengths; all None where there are none."""
    if runs is None:
        return [None] * count
    if not (isinstance(runs, list) and len(runs) == 2 and all(isinstance(part, list) for part in runs)):
        raise Malformed("shapes that are not run lengths")
    distinct, lengths = runs
    values = [tuple(int(n) for n in value) if isinstance(value, list) else None for value in distinct]
    out: list[tuple[int, ...] | None] = []
    for i in range(0, len(lengths) - 1, 2):
        number, length = lengths[i], lengths[i + 1]
        if type(length) is not int or not 0 <= length <= count - len(out):
            raise Malformed("run lengths beyond the table")
        out.extend([values[number]] * length)
    return out


def _cause(data: Any) -> Cause:
    if not isinstance(data, dict):
        raise Malformed("a cause that is no object")
    stack = data.get("stack")
    chain = data.get("chain")
    return Cause(
        operation=_clip(str(data.get("operation", "")), 500),
        chain=tuple(_clip(str(part), 500) for part in chain[:100]) if isinstance(chain, list) else (),
        frame=_frame(data.get("frame")),
        stack=tuple(f for f in map(_frame, stack[:100]) if f) if isinstance(stack, list) else (),
        target=_clip(str(data.get("target", "")), 500),
        request=_clip(str(data.get("request", "")), 500),
    )


def _frame(data: Any) -> Frame | None:
    if not isinstance(data, dict):
        return None
    line = data.get("line")
    return Frame(
        file=_clip(str(data.get("file", "")), 1000),
        line=line if isinstance(line, int) and 0 <= line < 1 << 31 else 0,
        function=_clip(str(data.get("function", "")), 500),
        code=_clip(str(data.get("code", "")), 500),
    )


def _failure(data: Mapping[str, Any]) -> Failure:
    return Failure(
        type=_clip(str(data.get("type", "")), 200),
        message=_clip(str(data.get("message", "")), 4000),
        operation=_clip(str(data.get("operation", "")), 500),
        handled=data.get("handled") is True,
    )


def _clip(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
