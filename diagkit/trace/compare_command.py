"""``diagkit compare A B``: where two runs part first."""

from __future__ import annotations

import argparse
import json

from diagkit.language import add_argument
from diagkit.trace import open_trace, redact
from diagkit.trace.compare import compare
from diagkit.trace.progress import on_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="a folder of rank-*.jsonl files, or one such file")
    parser.add_argument("second", metavar="B", help="the other run")
    parser.add_argument("--json", action="store_true", help="the comparison as data")
    redact.add_arguments(parser)
    add_argument(parser)


def main(args: argparse.Namespace) -> int:
    first, second = redact.asked(args, open_trace(args.first, on_stderr), open_trace(args.second, on_stderr))
    found = compare(first, second)
    if args.json:
        print(json.dumps({"a": str(first.path), "b": str(second.path), **found.to_json()}, ensure_ascii=False))
    else:
        print(f"A: {first!r}")
        print(f"B: {second!r}")
        print(found)
    return int(not found.equal)
