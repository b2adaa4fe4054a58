"""``diagkit export TRACE --to parquet|csv|jsonl``: a trace as tables for other tools, or as a trace once more.

Three tables: ``residencies`` (a line per rank, moment and tensor that changed there), ``moments`` (what happened, and
who did it) and ``ranks`` (who recorded). They are written rank by rank, so that memory follows one rank. In CSV a text
that a spreadsheet would take for a formula gets an apostrophe in front, which spreadsheets do not show. ``jsonl`` is
diagkit's own form: with ``--redact``, a trace to hand to strangers.
"""

from __future__ import annotations

import argparse
import csv
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from diagkit.errors import MissingDependency, UsageError
from diagkit.trace import open_trace, redact
from diagkit.trace.frames import COLUMNS, lines
from diagkit.trace.merged import Trace
from diagkit.trace.progress import on_stderr
from diagkit.trace.rank import RankTrace
from diagkit.trace.rewrite import rewrite

__all__ = ["FORMATS", "TABLES", "add_arguments", "export", "main"]

FORMATS = ("parquet", "csv", "jsonl")

#: A spreadsheet takes a text for a formula when it begins so, also after blanks or with the wide forms of the signs.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")

Line = tuple[Any, ...]


class Table(NamedTuple):
    """A table's name, its columns with their types (``int``, ``float``, ``bool``, ``str``), and the lines of a rank."""

    name: str
    columns: dict[str, type]
    lines: Any


_MOMENTS: dict[str, type] = {
    "rank": int, "moment": int, "time": float, "clock": float, "phase": int, "phase_name": str, "kind": str,
    "label": str, "changes": int, "cause": str, "file": str, "line": int, "function": str, "code": str,
    "failure": str, "message": str, "operation": str,
}  # fmt: skip
_RANKS: dict[str, type] = {
    "rank": int, "world_size": int, "run": str, "host": str, "torch": str, "python": str, "device": str,
    "device_index": int, "simulated": bool, "backends": str, "detail": str, "revision": str, "moments": int,
    "rows": int, "ended": str, "problems": str,
}  # fmt: skip


def _moments(rank: RankTrace) -> Iterator[Line]:
    for m in rank.moments:
        phase = rank.phases.get(m.phase)
        cause, failure = m.cause, m.failure
        frame = cause.frame if cause else None
        yield (
            rank.rank, m.index, m.time, m.clock, m.phase, phase.name if phase else "", m.kind,
            m.label, sum(change.count for change in m.changes), str(cause) if cause else None,
            *((frame.file, frame.line, frame.function, frame.code) if frame else (None,) * 4),
            *((failure.type, failure.message, failure.operation) if failure else (None,) * 3),
        )  # fmt: skip


def _rank(rank: RankTrace) -> Iterator[Line]:
    h = rank.header
    yield (
        h.rank, h.world_size, h.run, h.host, h.torch, h.python, h.device,
        h.device_index, h.simulated, h.backends, h.detail, h.revision, len(rank.moments),
        len(rank.rows), rank.ended, "; ".join(rank.problems) or None,
    )  # fmt: skip


TABLES = (
    Table("residencies", COLUMNS, lines),
    Table("moments", _MOMENTS, _moments),
    Table("ranks", _RANKS, _rank),
)


def export(trace: Trace, folder: str | os.PathLike[str], to: str = "parquet") -> list[Path]:
    """Writes the tables, or the trace, into the folder, which is made if need be, and returns the files.

    Raises:
        UsageError: unknown format, a file is there already, or the folder cannot be written.
        MissingDependency: Parquet without pyarrow.
    """
    if to not in FORMATS:
        raise UsageError("unknown format", found=to, expected=", ".join(FORMATS))
    place = Path(folder)
    write = _parquet_writer() if to == "parquet" else _write_csv
    try:
        place.mkdir(parents=True, exist_ok=True)
        if to == "jsonl":
            return rewrite(trace, place)
        files = [place / f"{table.name}.{to}" for table in TABLES]
        for file in files:
            if file.exists() or file.is_symlink():
                raise FileExistsError(errno.EEXIST, "", str(file))
        for file, table in zip(files, TABLES, strict=True):
            write(file, table, trace)
        return files
    except FileExistsError as error:
        raise UsageError(
            "there is such a file already", where=error.filename or place, remedy="Name another folder with -o"
        ) from error
    except OSError as error:
        raise UsageError(
            "cannot export", found=error.strerror or error, where=place, remedy="Name a folder that can be written"
        ) from error


class _Write(Protocol):
    def __call__(self, file: Path, table: Table, trace: Trace) -> None: ...


def _write_csv(file: Path, table: Table, trace: Trace) -> None:
    with file.open("x", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(table.columns)
        for rank in trace:
            writer.writerows(map(_harmless, table.lines(rank)))


def _harmless(line: Line) -> Iterable[Any]:
    return [f"'{v}" if isinstance(v, str) and v.lstrip(" ").startswith(_FORMULA) else v for v in line]


def _parquet_writer() -> _Write:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency(
            "Parquet needs pyarrow", remedy="pip install 'diagkit[parquet]', or export with --to csv"
        ) from None
    types = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_(), str: pyarrow.string()}

    def write(file: Path, table: Table, trace: Trace) -> None:
        schema = pyarrow.schema([(name, types[its]) for name, its in table.columns.items()])
        with file.open("xb") as out, pyarrow.parquet.ParquetWriter(out, schema, compression="zstd") as writer:
            for rank in trace:
                columns = list(zip(*table.lines(rank), strict=True)) or [()] * len(schema)
                arrays = [pyarrow.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

    return write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a folder of rank-*.jsonl files, or one such file")
    parser.add_argument("--to", choices=FORMATS, required=True, help="which kind of file")
    parser.add_argument("-o", "--out", metavar="DIR", default="export", help="where to (default: ./export)")
    redact.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    (trace,) = redact.asked(args, open_trace(args.trace, on_stderr))
    for file in export(trace, args.out, args.to):
        print(file)
    return 0
