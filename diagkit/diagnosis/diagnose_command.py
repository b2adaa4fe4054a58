"""``diagkit diagnose TRACE``: the findings in a folder of traces."""

from __future__ import annotations

import argparse
import json

from diagkit.diagnosis.diagnose import diagnose
from diagkit.diagnosis.rule import SEVERITIES
from diagkit.language import add_argument, tr
from diagkit.trace import open_trace, redact
from diagkit.trace.progress import on_stderr

FAIL_ON = (*SEVERITIES, "never")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a folder of rank-*.jsonl files, or one such file")
    parser.add_argument("--json", action="store_true", help="the findings as data")
    redact.add_arguments(parser)
    add_argument(parser)
    parser.add_argument(
        "--fail-on",
        metavar="LEVEL",
        choices=FAIL_ON,
        default=SEVERITIES[0],
        help=f"leave with exit code 1 from this severity on: {', '.join(FAIL_ON)} (default: {SEVERITIES[0]}, so any)",
    )


def main(args: argparse.Namespace) -> int:
    (trace,) = redact.asked(args, open_trace(args.trace, on_stderr))
    findings = diagnose(trace)
    problems = trace.problems
    if args.json:
        print(json.dumps({"trace": str(trace.path), **findings.to_json(), "damage": problems}, ensure_ascii=False))
    else:
        print(repr(trace))
        print(findings)
        for problem in problems[:10]:
            print(f"{tr('missing')}: {problem}")
    if findings.blind and not findings:
        return 2  # as for a trace that cannot be read: "well" would be a claim about tensors that nobody saw
    return int(args.fail_on != "never" and bool(findings.at_least(args.fail_on)))
