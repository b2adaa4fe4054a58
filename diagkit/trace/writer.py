"""Writes one rank's trace: append-only, one JSON event a line, each handed to the kernel as it happens.

The rules: no exception leaves this module after construction; nothing is buffered, so that a killed process loses
at most its last line; a write that fails is counted, warned about once, and told in the trace as soon as the trace
can be written again. The public generator of traces (for tests, and for tools that want to write this format) is
this class, used without torch.

Events, beside ``ev``, ``seq`` (counts every event of the file), ``t`` (wall seconds), ``m`` (monotonic seconds),
``ph`` (ordinal of the phase, 0 outside):

``header``   the fields of `schema.Header`; always the first line
``table``    ``hash base model kind names parts of shapes``: rows ``base ...``; the hash comes first, so that a
reader of many ranks parses equal
             tables once; ``parts`` is absent where all are empty, ``of`` and ``shapes`` where all are null
``local``    ``base shapes runs``: this rank's local shapes of rows ``base ...``, as run lengths over distinct shapes
``moment``   ``kind label d`` and, where they apply, ``key facts cause causes failure phase calls``: ``d`` is flat,
             ``gap count facts exchanged`` per run of rows, where gap counts from the end of the run before;
             ``facts`` and ``causes`` define the numbers used from here on; ``phase`` names the phase that begins
``trouble``  ``where error``: a fault of the recorder's own, or writes that were lost
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
from typing import Any, Protocol

from diagkit.errors import TraceError
from diagkit.trace.schema import Cause, Change, Facts, Failure, Header, Row, facts_to_json

#: A whole state is written in place of a difference every so many moments, so that a damaged line costs a reader
#: little.
KEY_EVERY = 64
#: Bytes of text kept of an exception's message.
MESSAGE_LIMIT = 2000


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


class Sink(Protocol):
    """Where lines go."""

    def write(self, line: bytes) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class MemorySink:
    """Keeps the lines; for a live look that leaves no file behind."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class FileSink:
    """Unbuffered appends to one file, by the process that opened it alone: a forked child writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner = os.getpid()
        self._torn = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)

    def write(self, line: bytes) -> None:
        if os.getpid() != self._owner:
            return
        if self._torn:
            line = b"\n" + line  # what a full disk left of an earlier line must not swallow this one
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            self._torn = self._torn or done > 0
            raise
        self._torn = False

    def sync(self) -> None:
        if os.getpid() == self._owner:
            os.fsync(self._file)

    def close(self) -> None:
        if os.getpid() == self._owner:
            os.close(self._file)


class TraceWriter:
    """One rank's trace. Not thread-safe: the recorder serialises."""

    def __init__(self, sink: Sink, header: Header) -> None:
        self._sink = sink
        self._seq = 0
        self._lost = 0
        self._warned = False
        self._closed = False
        self._facts: dict[Facts, int] = {}
        self._causes: dict[Cause, int] = {}
        self._new_facts: dict[int, Facts] = {}
        self._since_key = 0
        self.moments = 0
        self._emit("header", 0, asdict(header))

    @classmethod
    def create(cls, folder: str | os.PathLike[str], header: Header, *, overwrite: bool = False) -> TraceWriter:
        """A writer for this rank's file in the folder, which is made if need be.

        Raises:
            TraceError: the folder cannot be written, or holds this rank's trace of another run.
        """
        path = rank_file(open_folder(folder), header.rank)
        if overwrite:
            path.unlink(missing_ok=True)
        elif path.exists() and path.stat().st_size:
            raise TraceError("a trace is there already", where=path, remedy="Name a new folder, or pass overwrite=True")
        try:
            return cls(FileSink(path), header)
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
            number = len(self._facts) + 1
            self._facts[facts] = number
            self._new_facts[number] = facts
        return number

    def table(
        self, rows: Sequence[Row], local_shapes: Sequence[tuple[int, ...] | None] | None = None, phase: int = 0
    ) -> None:
        """Names rows; their ids must go on where the last table ended. All of one table share kind and model."""
        if not rows:
            return
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
        digest = hashlib.blake2b(_dump(body), digest_size=12).hexdigest()
        self._emit("table", phase, {"hash": digest, **body})
        if local_shapes is not None and any(shape is not None for shape in local_shapes):
            self._emit("local", phase, {"base": rows[0].id, "shapes": _runs(local_shapes)})

    def wants_key(self) -> bool:
        """Whether the next moment should carry the whole state."""
        return self.moments == 0 or self._since_key >= KEY_EVERY

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
        event: dict[str, Any] = {"kind": kind, "label": label}
        if key:
            event["key"] = 1
            self._since_key = 0
        self._since_key += 1
        self.moments += 1
        if self._new_facts:
            event["facts"] = {str(number): facts_to_json(facts) for number, facts in self._new_facts.items()}
            self._new_facts = {}
        if cause is not None:
            number = self._causes.get(cause)
            if number is None:
                number = self._causes[cause] = len(self._causes) + 1
                event["causes"] = {str(number): asdict(cause)}
            event["cause"] = number
        if failure is not None:
            event["failure"] = {**asdict(failure), "message": failure.message[:MESSAGE_LIMIT]}
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
        self._emit("moment", phase, event)
        if failure is not None:
            self._sync()

    def trouble(self, where: str, error: str, phase: int = 0) -> None:
        """Tells a fault of the recorder's own."""
        self._emit("trouble", phase, {"where": where, "error": error[:MESSAGE_LIMIT]})

    def close(self, reason: str = "closed", phase: int = 0) -> None:
        """Ends the trace; further calls do nothing."""
        if self._closed:
            return
        self._emit("end", phase, {"reason": reason})
        self._sync()
        self._closed = True
        with contextlib.suppress(OSError):
            self._sink.close()

    def _emit(self, ev: str, phase: int, body: Mapping[str, Any]) -> None:
        if self._closed:
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._emit(
                "trouble", phase, {"where": "writer", "error": f"{lost} events before this one could not be written"}
            )
            if self._lost:  # still not writable: this event is lost too
                self._lost += lost
                return
        event = {
            "ev": ev,
            "seq": self._seq,
            "t": round(time.time(), 6),
            "m": round(time.monotonic(), 6),
            "ph": phase,
            **body,
        }
        self._seq += 1
        try:
            self._sink.write(_dump(event) + b"\n")
        except (OSError, ValueError) as error:
            self._lost += 1
            if not self._warned:
                self._warned = True
                with contextlib.suppress(Exception):  # a warning turned into an error must not reach the job either
                    warnings.warn(
                        f"diagkit cannot write its trace ({error}); the job goes on, the trace has a gap",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _sync(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._sink.sync()


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, default=str).encode("ascii")


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
