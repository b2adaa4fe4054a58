"""``diagkit explain JOB.LOG|-``: what the first failure in a log means, when the log is all there is."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from diagkit.diagnosis.logs import explain_log
from diagkit.errors import UsageError
from diagkit.language import add_argument, tr

#: Bytes of a line that are read in one piece, and bytes by which text is told from what is none.
PIECE, SAMPLE = 1 << 16, 1 << 13

_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="a job's log, of one or of many ranks; - reads standard input")
    parser.add_argument("--json", action="store_true", help="the explanation as data")
    add_argument(parser)


def main(args: argparse.Namespace) -> int:
    if args.log == "-":
        binary: BinaryIO | None = getattr(sys.stdin, "buffer", None)
        found = explain_log(sys.stdin if binary is None else _lines(binary, "standard input"))
    else:
        try:
            path = Path(args.log)
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                what = "a folder" if stat.S_ISDIR(mode) else "a device or a socket"
                raise UsageError("cannot read the log", found=what, where=args.log, remedy="Name a text file, or -")
            with path.open("rb") as file:
                found = explain_log(_lines(file, args.log))
        except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
            raise UsageError(
                "cannot read the log",
                found=getattr(error, "strerror", None) or str(error),
                where=args.log if len(args.log) <= 200 else f"{args.log[:200]}...",
                remedy="Name a text file, or -",
            ) from None
    if found is None:
        print(json.dumps(None) if args.json else tr("no exception in this log"))
        return 0
    print(json.dumps(found.to_json(), ensure_ascii=False) if args.json else found)
    return int(found.code is not None)


def _lines(file: BinaryIO, where: str) -> Iterator[str]:
    """The lines of a log, the longest in pieces; a progress bar's carriage return ends a line, too.

    Raises:
        UsageError: it is no text in an encoding like UTF-8.
    """
    beginning = list(itertools.islice(iter(lambda: file.readline(PIECE), b""), 1))
    for piece in itertools.chain(beginning, iter(lambda: file.readline(PIECE), b"")):
        if beginning:
            _refuse_what_is_no_text(beginning.pop()[:SAMPLE], where)
        yield from piece.decode("utf-8", errors="replace").rstrip("\r\n").split("\r")


def _refuse_what_is_no_text(sample: bytes, where: str) -> None:
    name = where if where != "standard input" else "LOG"
    found, remedy = "", ""
    body = sample.lstrip(b"\0")  # a log cut off while it was written begins with zeros
    if sample.startswith(b"\x1f\x8b"):
        found, remedy = "gzip", f"Unpack it: gunzip -c {name} | diagkit explain -"
    elif sample.startswith((b"\xff\xfe", b"\xfe\xff")) or body[1::2].count(0) > len(body) // 3:
        found, remedy = "UTF-16", f"Convert it: iconv -f UTF-16 -t UTF-8 {name} | diagkit explain -"
    elif len(_CONTROL.findall(body)) > len(body) // 20:
        found, remedy = "binary data", "Name a text file, unpacked"
    if found:
        raise UsageError("the log is no plain text", found=found, where=where, remedy=remedy)
