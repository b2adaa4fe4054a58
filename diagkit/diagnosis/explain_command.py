"""``diagkit explain JOB.LOG|-``: what the first failure in a log means, when the log is all there is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from diagkit.diagnosis.logs import explain_log
from diagkit.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="a job's log, of one or of many ranks; - reads standard input")
    parser.add_argument("--json", action="store_true", help="the explanation as data")


def main(args: argparse.Namespace) -> int:
    if args.log == "-":
        found = explain_log(sys.stdin)
    else:
        try:
            with Path(args.log).open(encoding="utf-8", errors="replace") as file:
                found = explain_log(file)
        except OSError as error:
            raise UsageError(
                "cannot read the log",
                found=error.strerror or str(error),
                where=args.log,
                remedy="Name a text file, or -",
            ) from None
    if found is None:
        print(json.dumps(None) if args.json else "no exception in this log")
        return 0
    print(json.dumps(found.to_json(), ensure_ascii=False) if args.json else found)
    return int(found.code is not None)
