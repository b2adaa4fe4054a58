"""``diagkit report TRACE -o FILE``: a run's story in one file, for whoever was not there."""

from __future__ import annotations

import argparse
from pathlib import Path

from diagkit.language import add_argument
from diagkit.trace import open_trace, redact
from diagkit.trace.progress import on_stderr
from diagkit.views.report import form_of, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a folder of rank-*.jsonl files, or one such file")
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="FILE.html (a page), FILE.md or FILE.json"
    )
    add_argument(parser)
    parser.add_argument("--against", metavar="TRACE2", help="a run after the fix: says whether the fix held")
    redact.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Write the report; where it stands is the one line of output."""
    path = Path(args.output)
    form_of(path)  # before the reading, which may take long
    traces = [open_trace(place, on_stderr) for place in (args.trace, args.against) if place is not None]
    trace, *later = redact.asked(args, *traces)
    print(write(trace, path, lang=args.lang, against=later[0] if later else None))
    return 0
