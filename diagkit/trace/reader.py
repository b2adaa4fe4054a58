"""Reads one rank's trace, whatever state it is in.

The rules: a damaged, unknown or absurd line costs that line and is told in ``problems``; nothing is trusted (types,
ranges, numbers of rows); memory follows the file, never a number in it, and ends at `MEMORY`; a file is read as far as
it went when it was opened; only a path that holds no trace at all raises.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from diagkit.language import msg, tr
from diagkit.trace import values
from diagkit.trace.rank import PROBLEM_LIMIT, RankTrace, State, Transition
from diagkit.trace.schema import (
    ABSENT,
    ENTER,
    EXIT,
    KINDS,
    MOMENT_KINDS,
    SCHEMA_VERSION,
    Change,
    Facts,
    Header,
    Moment,
    Phase,
    Row,
    facts_from_json,
)
from diagkit.trace.values import Malformed, clip
from diagkit.trace.writer import table_hash

__all__ = ["PROBLEM_LIMIT", "Malformed", "RankTrace", "State", "TableCache", "Transition", "read_file", "read_rank"]

#: No line of ours is longer; a longer one is skipped unread. Parsed, a hostile line takes up to 24 times its length.
LINE_LIMIT = 8 << 20
#: Bytes that the records of all ranks of a run may take, roughly counted.
MEMORY = 320 << 20
#: Rows that the changes of one rank may touch, all together: following them is work, whoever asks.
TOUCHES = 100_000_000
#: The longest name that is kept whole.
NAME_LIMIT = 1000
#: Bytes that a row, a moment with its phase, and a change take; and a byte of any other text once it is a record.
_ROW, _MOMENT, _CHANGE, _TEXT = 250, 1000, 100, 6

_TABLE_HASH = re.compile(rb'"ev":"table",.{0,200}?"hash":"([0-9a-f]{8,64})"')
_ON_EVERY_TABLE = ("ev", "seq", "t", "m", "ph", "hash")
_EVENTS = ("header", "table", "local", "moment", "trouble", "standstill", "end")


class _Full(Exception):
    """There is more to this trace than can be taken in; the message says of what."""


@dataclass(slots=True)
class TableCache:
    """Tables already parsed, by hash, and the room that is left; shared between the ranks of one run."""

    rows: dict[bytes, list[Row]] = field(default_factory=dict)
    room: int = MEMORY
    whole: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)  # by the identities of the tables in it

    def spend(self, size: int) -> None:
        """Takes the size of new records off."""
        self.room -= size
        if self.room < 0:
            raise _Full(f"the records fill {MEMORY >> 20} MB already")


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
                raise Malformed(
                    tr("the line is not finished (the process ended while writing it, or is still writing)")
                )
            seq = builder.line(line)
        except _Full as full:
            trace._problem(f"from line {number} on it is not read: {full}")
            break
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            why = clip(str(error) or type(error).__name__)
            trace._problem(tr("line {number}: {why}; skipped", number=number, why=why))
            continue
        if seq > expected:
            text = msg("line {number}: {count} event(s) before it are missing")
            trace._problem(tr(text, number=number, count=seq - expected))
        elif seq < expected:
            trace._problem(tr("line {number}: event {seq} comes again or late", number=number, seq=seq))
        expected = max(expected, seq + 1)
    builder.finish()
    return trace


def read_file(path: Path, cache: TableCache | None = None) -> RankTrace:
    """The trace in one rank's file.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        return read_rank(_bounded_lines(file, os.fstat(file.fileno()).st_size), path, cache)


def _bounded_lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The lines of the first ``size`` bytes: a file may grow faster than it is read."""
    while size > 0 and (line := file.readline(min(size, LINE_LIMIT))):
        size -= len(line)
        if len(line) == LINE_LIMIT and not line.endswith(b"\n"):
            while size > 0 and (rest := file.readline(min(size, LINE_LIMIT))):
                size -= len(rest)
                if rest.endswith(b"\n"):
                    break
            yield b"(a line of more than %d MB)\n" % (LINE_LIMIT >> 20)
        else:
            yield line


class _Builder:
    """Turns events into a RankTrace."""

    def __init__(self, trace: RankTrace, cache: TableCache) -> None:
        self.trace = trace
        self.cache = cache
        self.seen_header = False
        self.hash_fits = True
        self.length = 0  # of the line
        self.touches = 0  # rows that changes have touched
        self.tables: list[int] | None = []  # identities of the cached tables; None: one of them could not be cached

    def line(self, line: bytes) -> int:
        known = _TABLE_HASH.search(line, 0, 400) if self.seen_header else None
        if known and (rows := self.cache.rows.get(known[1])) is not None and rows[0].id == len(self.trace.rows):
            self._extend(rows)
            number = re.search(rb'"seq":([0-9]{1,15})', line[:100])
            return int(number[1]) if number else 0
        self.length = len(line)
        event = json.loads(line)
        if not isinstance(event, dict):
            raise Malformed(f"expected an object, found {type(event).__name__}")
        self.hash_fits = event.get("ev") != "table" or event.get("hash") == table_hash(
            {name: value for name, value in event.items() if name not in _ON_EVERY_TABLE}
        )
        if values.suspect(line):
            event = values.clean(event)
        seq = values.whole(event, "seq")
        handler = getattr(self, f"on_{event.get('ev')}", None) if event.get("ev") in _EVENTS else None
        if handler is None:
            raise Malformed(f"unknown event {clip(repr(event.get('ev')))}")
        if not self.seen_header and event["ev"] != "header":
            self._no_header()
        handler(event)
        return seq

    def _no_header(self) -> None:
        self.trace._problem(tr("the header is missing"))
        self.seen_header = self.trace.headless = True
        named = re.fullmatch(r"rank-([0-9]{1,9})\.jsonl", self.trace.path.name) if self.trace.path else None
        if named:
            rank = int(named[1])
            self.trace.header = Header(rank=rank, world_size=rank + 1)

    def on_header(self, event: Mapping[str, Any]) -> None:
        if self.seen_header:
            raise Malformed("a second header")
        self.seen_header = True
        self.cache.spend(_TEXT * self.length)
        known = {f.name: f for f in fields(Header)}
        taken: dict[str, Any] = {}
        for name, f in known.items():
            value = event.get(name, f.default)
            if name == "argv":
                value = tuple(clip(str(v), 1000) for v in value[:1000]) if isinstance(value, list) else ()
            elif name == "job":
                value = values.shallow(value) if isinstance(value, dict) else {}
            elif isinstance(f.default, bool):
                value = value is True
            elif isinstance(f.default, int):
                value = (
                    value
                    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
                    else f.default
                )
            elif isinstance(f.default, str):
                value = clip(value, 1000) if isinstance(value, str) else f.default
            else:
                value = value if isinstance(value, int) and abs(value) < 1 << 31 else None
            taken[name] = value
        if taken["schema"] != SCHEMA_VERSION:
            self.trace._problem(
                f"schema {taken['schema']}, this diagkit reads {SCHEMA_VERSION}: what it does not know is left out"
            )
        self.trace.header = Header(**taken)

    def on_table(self, event: Mapping[str, Any]) -> None:
        rows = self.trace.rows
        base, names = values.whole(event, "base"), values.array(event, "names")
        if (
            base >= 0
            and base + len(names) <= len(rows)
            and [row.name for row in rows[base : base + len(names)]] == names
        ):
            return  # written again, because an interrupt had kept its writer from knowing that it was there
        if base != len(rows):
            raise Malformed(f"a table that starts at row {base}, expected {len(rows)}")
        kind, model = event.get("kind"), event.get("model")
        if kind not in KINDS or not isinstance(model, str):
            raise Malformed(f"a table of unknown kind {clip(repr(kind))}")
        count = len(names)
        self.cache.spend(count * _ROW + sum(map(len, map(str, names))))
        parts = values.array(event, "parts", [""] * count)
        owners = values.array(event, "of", [None] * count)
        shapes = values.expand(event.get("shapes"), count)
        if not len(parts) == len(owners) == len(shapes) == count or not all(
            isinstance(n, str) for n in (*names, *parts)
        ):
            raise Malformed("a table whose columns do not fit each other")
        if any(len(name) > NAME_LIMIT for name in names):
            self.trace._problem(f"names of more than {NAME_LIMIT} characters are cut")
            names = [clip(name, NAME_LIMIT) for name in names]
        new = [
            Row(
                base + i,
                kind,
                clip(model),
                names[i],
                clip(parts[i]),
                shapes[i],
                owners[i] if isinstance(owners[i], int) and 0 <= owners[i] < base else None,
            )
            for i in range(count)
        ]
        if not self.hash_fits:
            self.tables = None
            self.trace._problem(f"the hash of the table of rows {base} to {base + count - 1} does not fit its names")
        elif new:
            new = self.cache.rows.setdefault(event["hash"].encode("ascii"), new)
        self._extend(new)

    def _extend(self, rows: list[Row]) -> None:
        self.trace.rows.extend(rows)
        if self.tables is not None:
            self.tables.append(id(rows))

    def on_local(self, event: Mapping[str, Any]) -> None:
        base = values.whole(event, "base")
        runs = values.shape_runs(event.get("shapes"), len(self.trace.rows) - base)
        self.cache.spend(16 * len(runs[1]) + _ROW * len(runs[0]))
        self.trace.local_shapes.add(base, runs)

    def on_moment(self, event: Mapping[str, Any]) -> None:
        trace = self.trace
        for number, data in values.mapping(event, "facts").items():
            self._define(int(number), data)
        for number, data in values.mapping(event, "causes").items():
            trace.causes[int(number)] = values.cause(data)
        kind = event.get("kind")
        if kind not in MOMENT_KINDS:
            raise Malformed(f"a moment of unknown kind {clip(repr(kind))}")
        flat = values.array(event, "d", [])
        text = max(0, self.length - 8 * len(flat) // 4)
        self.cache.spend(_MOMENT + _CHANGE * len(flat) // 4 + _TEXT * text)
        changes = self._changes(flat)
        self.touches += sum(change.count for change in changes) + len(trace.rows) * (event.get("key") == 1)
        if self.touches > TOUCHES:
            raise _Full(f"its changes touch more than {TOUCHES:,} rows")
        failure = values.failure(event["failure"]) if isinstance(event.get("failure"), dict) else None
        ordinal = values.whole(event, "ph")
        moment = Moment(
            index=len(trace.moments),
            seq=values.whole(event, "seq"),
            time=values.real(event, "t"),
            clock=values.real(event, "m"),
            phase=ordinal,
            kind=kind,
            label=clip(str(event.get("label", "")), 500),
            changes=changes,
            cause=trace.causes.get(event["cause"]) if isinstance(event.get("cause"), int) else None,
            failure=failure,
            key=event.get("key") == 1,
        )
        trace.moments.append(moment)
        trace.standstill = None  # it went on
        self._phase(event, moment)

    def _define(self, number: int, data: Any) -> None:
        trace = self.trace
        try:
            facts: Facts | None = facts_from_json(data)
        except (ValueError, TypeError, AttributeError) as error:
            trace._problem(f"facts {number}: {clip(str(error))}")
            facts = None
        index = trace._facts_of.get(number)
        if index is not None and trace.facts[index] is None:
            trace.facts[index] = facts  # used before, in the gap that a damaged line left
        elif index is None or (facts is not None and trace.facts[index] != facts):
            trace.facts.append(facts)
            trace._facts_of[number] = len(trace.facts) - 1

    def _phase(self, event: Mapping[str, Any], moment: Moment) -> None:
        phases = self.trace.phases
        ordinal = moment.phase
        phase = phases.get(ordinal)
        if phase is None:
            info = values.mapping(event, "phase")
            parent = info.get("parent")
            phase = Phase(
                ordinal,
                clip(str(info.get("name", "?")), 500),
                parent if isinstance(parent, int) and parent in phases else 0,
                clip(str(info.get("label", "")), 500),
            )
            phases[ordinal] = phase
        if moment.kind == ENTER:
            phase.enter = moment.index
        elif moment.kind == EXIT:
            phase.exit = moment.index
        if moment.failure is not None and ordinal:
            phase.failed = True
        for name, count in values.mapping(event, "calls").items():
            if type(count) is int and 0 <= count < 1 << 53:
                name = clip(name)
                phase.calls[name] = phase.calls.get(name, 0) + count

    def _changes(self, flat: list[Any]) -> tuple[Change, ...]:
        if len(flat) % 4 or not set(map(type, flat)) <= {int} or (flat and min(flat) < 0):
            raise Malformed("changes that are not groups of four numbers")
        out = []
        end = 0
        for i in range(0, len(flat), 4):
            gap, count, number, exchanged = flat[i : i + 4]
            start, end = end + gap, end + gap + count
            if end > len(self.trace.rows):
                self.trace._problem(f"a change of row {end - 1}, there are {len(self.trace.rows)}")
                count = len(self.trace.rows) - start
                if count <= 0:
                    break
            if number and number not in self.trace._facts_of:
                self.trace._problem(f"facts {number} are used, but their definition cannot be read")
                self.trace.facts.append(None)
                self.trace._facts_of[number] = len(self.trace.facts) - 1
            out.append(Change(start, count, self.trace._facts_of[number] if number else ABSENT, exchanged == 1))
        return tuple(out)

    def on_trouble(self, event: Mapping[str, Any]) -> None:
        if len(self.trace.troubles) < 1000:
            self.trace.troubles.append(clip(f"{event.get('where')}: {event.get('error')}", 500))

    def on_standstill(self, event: Mapping[str, Any]) -> None:
        seconds = values.real(event, "seconds")
        self.trace.standstill = f"for {seconds:g} s at {clip(str(event.get('where')), 500)}"

    def on_end(self, event: Mapping[str, Any]) -> None:
        self.trace.ended = clip(str(event.get("reason", "closed")))

    def finish(self) -> None:
        trace = self.trace
        if self.tables is not None:  # ranks with the same tables share one list of rows
            trace.rows = self.cache.whole.setdefault(tuple(self.tables), trace.rows)
        if trace.ended is None:
            phase = trace.last_phase
            where = tr("in phase {number} ({name})", number=phase.ordinal, name=phase.name) if phase.ordinal else ""
            still = tr("; it had stood still {how_long}", how_long=trace.standstill) if trace.standstill else ""
            text = msg("rank {rank} was cut off {where}: no closing line{still}")
            where = where or tr("outside any phase")
            trace._problem(tr(text, rank=trace.rank, where=where, still=still))
