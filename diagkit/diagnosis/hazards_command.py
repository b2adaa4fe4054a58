"""``diagkit hazards [CODE]``: what each hazard is, how it is seen, what mends it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap

from diagkit.diagnosis.rule import MEANINGS, Rule, all_rules, find_rules
from diagkit.errors import UsageError
from diagkit.language import add_argument, tr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="one hazard, such as DK101; without it the list")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the whole catalogue as a page")
    form.add_argument("--json", action="store_true", help="as data")
    add_argument(parser)


def main(args: argparse.Namespace) -> int:
    rules = find_rules(args.code) if args.code else all_rules()
    if not rules:
        known = ", ".join(r.code for r in all_rules())
        raise UsageError("no such hazard", found=args.code, expected=known, remedy="Run diagkit hazards for the list")
    if args.json:
        print(json.dumps([as_data(r) for r in rules], ensure_ascii=False, indent=2))
    elif args.markdown:
        print(page(rules))
    elif args.code:
        print("\n\n".join(wrapped(r.lesson) for r in rules))
    else:
        for r in rules:
            print(f"{r.code:<8}{r.severity:<8}{r.title}")
        print("\n" + tr("diagkit hazards CODE says more."))
    return 0


def as_data(rule: Rule) -> dict[str, object]:
    """A rule as plain data."""
    return {"code": rule.code, "title": rule.title, "severity": rule.severity, "family": rule.family, **rule.text}


def page(rules: tuple[Rule, ...]) -> str:
    """The catalogue as Markdown: a table, then a section per hazard."""
    lines = ["# Device-residency hazards of FSDP2", ""]
    lines += ["Made from the rules' own texts by `make hazards`.", ""]
    lines += ["Severities, from mild to grave:", "", *(f"* {name}: {tr(text)}" for name, text in MEANINGS.items()), ""]
    lines += ["| code | hazard | severity |", "|---|---|---|"]
    lines += [f"| [{r.code}](#{r.code.lower()}) | {r.title} | {r.severity} |" for r in rules]
    for r in rules:
        lines += ["", f"## {r.code}", "", f"**{r.title}**", ""]
        for heading, text in r.text.items():
            if heading == "Call":
                lines += ["```python", *text.split("\n\n"), "```", ""]
            else:
                lines += [f"*{tr(heading)}.* {text}", ""]
    return "\n".join(lines).rstrip()


def wrapped(text: str) -> str:
    """Paragraphs at the terminal's width, at most 100 columns."""
    width = min(100, shutil.get_terminal_size().columns)
    return "\n".join(textwrap.fill(line, width, break_long_words=False) if line else "" for line in text.split("\n"))
