"""Writes one rank's trace: append-only, one JSON event a line, each handed to the kernel as it happens.

The rules: no exception leaves this module after construction; nothing is buffered, so that a killed process loses
at most its last line; a write that fails is counted, warned about once, and told in the trace as soon as the trace
can be written again, together with every name that the lost lines had defined, so that what follows can be read. The
public generator of traces (for tests, and for tools that want to write this format) is this class, used without torch.

Events, beside ``ev``, ``seq`` (counts every event of the file), ``t`` (wall seconds), ``m`` (monotonic seconds),
``ph`` (ordinal of the phase, 0 outside):

``header``   the fields of `schema.Header`; always the first line
``table``    ``hash base model kind names parts of shapes``: rows ``base ...``; the hash comes first, so that a
reader of many ranks parses equal
             tables once; ``parts`` is absent where all are empty, ``of`` and ``shapes`` where all are null
``local``    ``base shapes runs``: this rank's local shapes of rows ``base ...``, as run lengths over distinct shapes
``moment``   ``kind label d`` and, where they apply, ``key facts cause causes failure phase calls``: ``d`` is flat,
             ``gap count facts exchanged`` per run of rows, where gap counts from the end of the run before;
             ``facts`` and ``causes`` define the numbers used from here on (a whole state defines all facts that it
             uses again, so that one damaged line does not spoil the rest); ``phase`` names the phase that begins
``trouble``  ``where error``: a fault of the recorder's own, or writes that were lost
``standstill`` ``seconds where``: nothing was observed for so long, and where the process was then
``end``      ``reason``: closed in order
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagkit.errors import TraceError
from diagkit.trace.schema import FAILURE, Cause, Change, Facts, Failure, Header, Row, facts_to_json
from diagkit.trace.sinks import CappedSink, FileSink, MemorySink, NullSink, Sink

__all__ = ["FileSink", "MemorySink", "NullSink", "Sink", "TraceWriter", "open_folder", "rank_file", "table_hash"]

#: A whole state is written in place of a difference every so many moments, so that a damaged line costs a reader
#: little.
KEY_EVERY = 64
#: Rows of one table event; a line must stay shorter than what a reader takes.
TABLE_ROWS = 20_000
#: Bytes of text kept of an exception's message.
MESSAGE_LIMIT = 2000
#: Seconds after which one write counts as slow, which is told once.
SLOW = 1.0


def rank_file(folder: Path, rank: int) -> Path:
    """``FOLDER/rank-00003.jsonl``."""
    return folder / f"rank-{rank:05d}.jsonl"


def open_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if need be.

    Raises:
        TraceError: it cannot be made or is a file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            "cannot write a trace",
            found=error.strerror or error,
            where=path,
            remedy="Name a folder that can be written",
        ) from error
    return path


class TraceWriter:
    """One rank's trace. Not thread-safe: the recorder serialises."""

    def __init__(self, sink: Sink, header: Header) -> None:
        self._sink = sink
        self._seq = 0
        self._lost = 0
        self._why = ""
        self._warned = False
        self._slow = False
        self._closed = False
        self.path: Path | None = None
        self._facts: dict[Facts, int] = {}
        self._records: list[Facts] = []  # by number, less one
        self._causes: dict[Cause, int] = {}
        self._cause_count = 0
        self._new_facts: set[int] = set()
        self._since_key = 0
        self.moments = 0
        #: Rows whose exchange of storage was told by a moment that could not be written.
        self.unwritten_exchanges: set[int] = set()
        # What lost lines had defined, to be written again before anything else.
        self._unwritten: list[tuple[str, int, Mapping[str, Any]]] = []
        self._unwritten_phases: dict[int, Mapping[str, Any]] = {}
        self._emit("header", 0, asdict(header))

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], header: Header, *, overwrite: bool = False, limit: int = 0
    ) -> TraceWriter:
        """A writer for this rank's file in the folder, which is made if need be; ``limit`` is its size in bytes at
        which only failures are written, 0 for none.

        Raises:
            TraceError: the folder cannot be written, or holds this rank's trace of another run.
        """
        path = rank_file(open_folder(folder), header.rank)
        try:
            if overwrite:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size:
                raise TraceError(
                    "a trace is there already", where=path, remedy="Name a new folder, or pass overwrite=True"
                )
            writer = cls(CappedSink(FileSink(path), limit) if limit else FileSink(path), header)
            writer.path = path
            return writer
        except OSError as error:
            raise TraceError(
                "cannot write a trace",
                found=error.strerror or error,
                where=path,
                remedy="Name a folder that can be written",
            ) from error

    @property
    def lines(self) -> list[bytes]:
        """What a `MemorySink` keeps; empty for any other."""
        return self._sink.lines if isinstance(self._sink, MemorySink) else []

    def fact_id(self, facts: Facts) -> int:
        """The number of these facts; new ones are defined by the next moment that is written."""
        number = self._facts.get(facts)
        if number is None:
            self._records.append(facts)
            number = self._facts[facts] = len(self._records)
            self._new_facts.add(number)
        return number

    def table(
        self, rows: Sequence[Row], local_shapes: Sequence[tuple[int, ...] | None] | None = None, phase: int = 0
    ) -> None:
        """Names rows; their ids must go on where the last table ended. All of one table share kind and model."""
        for first in range(0, len(rows), TABLE_ROWS):
            those = slice(first, first + TABLE_ROWS)
            self._table(rows[those], None if local_shapes is None else local_shapes[those], phase)

    def _table(self, rows: Sequence[Row], local_shapes: Sequence[tuple[int, ...] | None] | None, phase: int) -> None:
        body: dict[str, Any] = {
            "base": rows[0].id,
            "model": rows[0].model,
            "kind": rows[0].kind,
            "names": [row.name for row in rows],
        }
        if any(row.part for row in rows):
            body["parts"] = [row.part for row in rows]
        if any(row.of is not None for row in rows):
            body["of"] = [row.of for row in rows]
        if any(row.shape is not None for row in rows):
            body["shapes"] = _runs([row.shape for row in rows])
        self._emit("table", phase, {"hash": table_hash(body), **body})
        if local_shapes is not None and any(shape is not None for shape in local_shapes):
            self._emit("local", phase, {"base": rows[0].id, "shapes": _runs(local_shapes)})

    def wants_key(self, kind: str = "") -> bool:
        """Whether the next moment, if of this kind, should carry the whole state."""
        if self._full and kind != FAILURE:
            return False  # it will not be written
        return self.moments == 0 or self._since_key >= KEY_EVERY

    @property
    def _full(self) -> bool:
        return isinstance(self._sink, CappedSink) and self._sink.full

    def ask_key(self) -> None:
        """Lets the next moment carry the whole state: differences since the last one may have been lost."""
        self._since_key = KEY_EVERY

    def moment(
        self,
        kind: str,
        label: str,
        phase: int,
        changes: Iterable[Change],
        *,
        key: bool = False,
        cause: Cause | None = None,
        failure: Failure | None = None,
        begins: Mapping[str, Any] | None = None,
        calls: Mapping[str, int] | None = None,
    ) -> None:
        """One moment. ``key``: the changes are the whole state. ``begins``: name, parent, label of a new phase."""
        changes = list(changes)
        if self._full and kind != FAILURE:
            self._lost += 1
            self._seq += 1
            self._lost_moment(phase, changes, None, begins)
            return
        event: dict[str, Any] = {"kind": kind, "label": label}
        if key:
            event["key"] = 1
            self._since_key = 0
        self._since_key += 1
        self.moments += 1
        defined = self._new_facts | ({change.facts for change in changes if change.facts} if key else set())
        if defined:
            event["facts"] = {str(number): facts_to_json(self._records[number - 1]) for number in sorted(defined)}
        new_cause = False
        if cause is not None:
            number = self._causes.get(cause)
            if number is None:
                new_cause = True
                self._cause_count += 1
                number = self._causes[cause] = self._cause_count
                event["causes"] = {str(number): asdict(cause)}
            event["cause"] = number
        if failure is not None:
            event["failure"] = {**asdict(failure), "message": failure.message[:MESSAGE_LIMIT]}
        begins = begins or self._unwritten_phases.get(phase)
        if begins:
            event["phase"] = dict(begins)
        if calls:
            event["calls"] = dict(calls)
        flat: list[int] = []
        end = 0
        for change in changes:
            flat += (change.start - end, change.count, change.facts, int(change.exchanged))
            end = change.start + change.count
        event["d"] = flat
        written = False
        try:
            written = self._emit("moment", phase, event)
        finally:
            if written:
                self._new_facts -= defined
                self._unwritten_phases.pop(phase, None)
                if key:
                    self.unwritten_exchanges.clear()
            else:
                self._lost_moment(phase, changes, cause if new_cause else None, begins)
        if failure is not None:
            self._sync()

    def _lost_moment(
        self, phase: int, changes: list[Change], new_cause: Cause | None, begins: Mapping[str, Any] | None
    ) -> None:
        """Remembers what nobody will read in the moment that could not be written."""
        self.ask_key()
        for change in changes:
            if change.exchanged:
                self.unwritten_exchanges.update(range(change.start, change.start + change.count))
        if new_cause is not None:
            del self._causes[new_cause]
        if begins:
            self._unwritten_phases[phase] = begins

    def trouble(self, where: str, error: str, phase: int = 0) -> None:
        """Tells a fault of the recorder's own."""
        self._emit("trouble", phase, {"where": where, "error": error[:MESSAGE_LIMIT]})
        self.ask_key()

    def standstill(self, seconds: float, where: str, phase: int = 0) -> None:
        """Tells that nothing happened for so long, and where the process is."""
        self._emit("standstill", phase, {"seconds": round(seconds, 1), "where": where[:MESSAGE_LIMIT]})

    def close(self, reason: str = "closed", phase: int = 0) -> None:
        """Ends the trace; further calls do nothing."""
        if self._closed:
            return
        self._emit("end", phase, {"reason": reason})
        self._sync()
        self._closed = True
        with contextlib.suppress(Exception):
            self._sink.close()

    def _emit(self, ev: str, phase: int, body: Mapping[str, Any]) -> bool:
        """Writes an event, after what was lost before it; whether it is in the trace."""
        if self._closed:
            return False
        written = False
        try:
            written = (not self._lost or self._catch_up(phase)) and self._put(ev, phase, body)
        except Exception as error:
            self._why = _one_line(error)
            self._warn(f"diagkit cannot write its trace ({self._why}); the job goes on, the trace has a gap")
        except BaseException as error:  # an interrupt by hand is the job's; the line it tore is a lost one
            self._why = type(error).__name__
            raise
        finally:
            if not written:
                self._lost += 1
                self._seq += 1  # so that a reader sees the gap
                if ev in ("header", "table", "local"):
                    self._unwritten.append((ev, phase, body))
        return written

    def _catch_up(self, phase: int) -> bool:
        """Tells how much was lost, and defines again what the lost lines had defined."""
        text = f"{self._lost} event(s) before this one could not be written ({self._why})"
        if self._unwritten and self._unwritten[0][0] == "header":
            if not self._put(*self._unwritten[0]):
                return False
            del self._unwritten[0]
        if not self._put("trouble", phase, {"where": "writer", "error": text}):
            return False
        self._lost = 0
        while self._unwritten:
            if not self._put(*self._unwritten[0]):
                return False
            del self._unwritten[0]
        return True

    def _put(self, ev: str, phase: int, body: Mapping[str, Any]) -> bool:
        began = time.monotonic()
        event = {"ev": ev, "seq": self._seq, "t": round(time.time(), 6), "m": round(began, 6), "ph": phase, **body}
        try:
            note = self._sink.write(_dump(event) + b"\n")
        except Exception as error:  # whatever it is, the job must not see it
            self._why = _one_line(error)
            self._warn(f"diagkit cannot write its trace ({self._why}); the job goes on, the trace has a gap")
            return False
        self._seq += 1
        if not self._slow and (took := time.monotonic() - began) >= SLOW:
            self._slow = True
            note = f"one write to the trace took {took:.1f} s, and the job waited for it"
        if note:
            self._warn(f"diagkit: {note}; the job goes on")
            self._put("trouble", phase, {"where": "writer", "error": note})
        return True

    def _warn(self, text: str) -> None:
        """Once per trace."""
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Exception):  # a warning turned into an error must not reach the job either
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _sync(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.sync()


def table_hash(body: Mapping[str, Any]) -> str:
    """What a table with these fields (less ``hash`` and the fields that every event has) is known by."""
    return hashlib.blake2b(_dump(body), digest_size=12).hexdigest()


def _one_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return " ".join(text.split())[:200]


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, default=str).encode


def _dump(value: object) -> bytes:
    return _encode(value).encode("ascii")


def _runs(values: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """``[distinct values, [number of a value, how often in a row, ...]]``."""
    distinct: dict[tuple[int, ...] | None, int] = {}
    runs: list[int] = []
    for value in values:
        number = distinct.setdefault(value, len(distinct))
        if runs and runs[-2] == number:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return [[None if value is None else list(value) for value in distinct], runs]
