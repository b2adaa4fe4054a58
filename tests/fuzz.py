"""Real traces, damaged in every way that chance finds, through all that reads a trace. No torch is needed.

Each case must end in a result or in one clear error: no other exception, no character that moves a terminal's cursor,
no markup that gets through, 512 MB of memory for the process, ten seconds of processor time a case (a hundred by the
clock). Run:

    python tests/fuzz.py --count 10000 TRACE
"""

from __future__ import annotations

import argparse
import ast
import html.parser
import json
import pathlib
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jsonschema

from diagkit.diagnosis import diagnose
from diagkit.errors import DiagkitError
from diagkit.language import LANGUAGES
from diagkit.trace import Trace, open_trace
from diagkit.trace.compare import compare
from diagkit.trace.export import export
from diagkit.trace.table import ResidencyTable
from diagkit.views.explorer import explore
from diagkit.views.report import FORMS, render
from diagkit.views.report.data import schema

VALIDATOR = jsonschema.Draft202012Validator(schema())
MEMORY, SECONDS = 512 << 20, 10

NAMES = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\x1b[31mred\x1b[0m", "\u202egnp.exe",
    "=1+1", "@SUM(A1)", "a" * 100_000, "a." * 40_000, "{0..999999999999}", "{" * 500, "\\", "%s%n", "../../etc/passwd",
    "\ud800", "\x00", "名前", "", " ", "\u2028", "rank-00000.jsonl", "x [exp_avg]", "{a,b}{a,b}{a,b}", "-1",
    "\N{COMBINING ACUTE ACCENT}" * 50,
]  # fmt: skip
NUMBERS: list[Any] = [
    0, -1, 1, 2**31, 2**53, 2**64, 10**12, 10**40, -(10**40), 1.5, 1e308, float("inf"), float("nan"), True, None,
]  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 1
    for n in range(levels):
        value = [value] if n % 2 else {"a": value}
    return value


THINGS: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.choice(NAMES),
    lambda draw: draw.choice(NUMBERS),
    lambda draw: deep(draw.choice([1, 30, 600])),
    lambda draw: [draw.choice(NUMBERS) for _ in range(draw.randrange(20))],
    lambda draw: {draw.choice(NAMES): draw.choice(NUMBERS) for _ in range(draw.randrange(5))},
    lambda draw: [[[4, 4]], [0, 10**12]],
    lambda draw: [0, 10**12, 1, 0] * draw.choice([1, 1000]),
    lambda draw: [],
    lambda draw: {},
]

Lines = list[bytes]


def places(value: Any, depth: int = 40) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of plain data, but for what lies deeper."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, item in inner if depth else ():
        yield value, key
        yield from places(item, depth - 1)


def dumped(event: Any) -> bytes:
    return json.dumps(event).encode("utf-8", "surrogatepass") + b"\n"


def values(lines: Lines, draw: random.Random) -> None:
    """Values of one event become something else, go, or come under another key."""
    at = draw.randrange(len(lines))
    event = json.loads(lines[at])
    for _ in range(draw.choice([1, 1, 2, 5])):
        found = list(places(event))
        if not found:
            break
        holder, key = draw.choice(found)
        what = draw.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[draw.choice(NAMES)] = holder.pop(key)
        else:
            holder[key] = draw.choice(THINGS)(draw)
    lines[at] = dumped(event)


def names(lines: Lines, draw: random.Random) -> None:
    """Names of rows are hostile, and the table's hash is right or wrong."""
    from diagkit.trace.writer import table_hash

    for at, line in enumerate(lines):
        event = json.loads(line)
        if event.get("ev") == "table":
            event["names"] = [draw.choice(NAMES) if draw.random() < 0.3 else name for name in event["names"]]
            if draw.random() < 0.7:
                plain = {k: v for k, v in event.items() if k not in ("ev", "seq", "t", "m", "ph", "hash")}
                event["hash"] = table_hash(plain)
            lines[at] = dumped(event)


def order(lines: Lines, draw: random.Random) -> None:
    """Lines go, come again, change places, or come from another rank's file."""
    for _ in range(draw.choice([1, 2, 10])):
        a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
        what = draw.randrange(3)
        if what == 0 and len(lines) > 1:
            del lines[a]
        elif what == 1:
            lines.insert(b, lines[a])
        else:
            lines[a], lines[b] = lines[b], lines[a]
        if not lines:
            break


def keys_twice(lines: Lines, draw: random.Random) -> None:
    """A key stands twice in an object."""
    at = draw.randrange(len(lines))
    name = draw.choice(["seq", "d", "ev", "names", "kind", "facts", "ph", "base"])
    value = dumped(draw.choice(THINGS)(draw)).strip()
    lines[at] = b'{"%s":%s,' % (name.encode(), value) + lines[at][1:]


def numbers(lines: Lines, draw: random.Random) -> None:
    """Numbers as no writer of ours writes them."""
    at = draw.randrange(len(lines))
    text = draw.choice([b"1e999", b"-1e999", b"9" * 5000, b"-0", b"1E400", b"NaN", b"Infinity", b"0.1e-9999"])
    found = list(re.finditer(rb"\b\d+(?:\.\d+)?\b", lines[at]))
    if found:
        one = draw.choice(found)
        lines[at] = lines[at][: one.start()] + text + lines[at][one.end() :]


def raw(lines: Lines, draw: random.Random) -> None:
    """Bytes change, go, come, or the file ends."""
    data = bytearray(b"".join(lines))
    for _ in range(draw.choice([1, 3, 20])):
        if not data:
            break
        at = draw.randrange(len(data))
        what = draw.randrange(5)
        if what == 0:
            data[at] = draw.randrange(256)
        elif what == 1:
            del data[at : at + draw.randrange(1, 300)]
        elif what == 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif what == 3:
            data[at:at] = b"[" * draw.choice([10, 5000, 100_000])
        else:
            del data[at:]
    lines[:] = bytes(data).splitlines(keepends=True)


def whole(lines: Lines, draw: random.Random) -> None:
    """As it was."""


WAYS = [values, values, values, names, order, keys_twice, numbers, raw, whole]


class Told(NamedTuple):
    """What became of a case: "read", or the kind of error; and how many problems were stated."""

    end: str
    problems: int


def shown(text: str) -> None:
    """Nothing in it moves a terminal's cursor or turns its direction."""
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"}
    assert not bad, f"characters {sorted(map(ascii, bad))} reach a terminal"
    text.encode("utf-8")


def page(text: str, scripts: int = 0) -> None:
    """No markup of a name gets through: no script but so many of our own, no handler, no link out of the page."""
    reader = Markup()
    reader.feed(text)
    reader.close()
    assert not reader.bad and reader.scripts == scripts, f"markup gets through: {reader.bad} {reader.scripts}"
    text.encode("utf-8")


class Markup(html.parser.HTMLParser):
    """What a browser would run, load or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag in ("img", "iframe", "object", "embed", "link", "base", "form", "foreignobject"):
            self.bad.add(tag)
        for name, value in attrs:
            out = name in ("href", "src", "action", "xlink:href") and not (value or "").startswith("#")
            if out or name.startswith("on"):
                self.bad.add(f"{tag} {name}")

    handle_startendtag = handle_starttag


def use(folder: pathlib.Path, original: Trace, out: pathlib.Path, draw: random.Random) -> Told:
    """Everything that reads a trace, once."""
    try:
        trace = open_trace(folder)
    except DiagkitError as error:
        shown(str(error))
        return Told(type(error).__name__, 0)
    findings = diagnose(trace)
    for text in (repr(trace), str(trace), repr(findings), *map(repr, trace)):
        shown(text)
    json.dumps(findings.to_json(), allow_nan=False).encode()
    page(findings._repr_html_())
    page(trace._repr_html_())
    for rank in trace:
        if rank.moments:
            shown(str(ResidencyTable.at(rank, -1)))
            page(ResidencyTable.at(rank, -1)._repr_html_())
    hidden = trace.redacted(names=True)
    shown(repr(diagnose(hidden)))
    try:
        found = compare(original, trace)
        shown(repr(found))
        page(found._repr_html_())
        json.dumps(found.to_json(), allow_nan=False).encode()
    except DiagkitError as error:
        shown(str(error))
    for file in export(trace, out, "csv"):
        file.unlink()
    report(trace, original, draw)
    return Told("read", len(trace.problems))


def report(trace: Trace, original: Trace, draw: random.Random) -> None:
    """One of its forms, alone or as the story of a fix, or the explorer: each takes as long as all else together."""
    form, lang = draw.choice((*FORMS, "explorer")), draw.choice(LANGUAGES)
    first, second = draw.choice([(trace, None), (trace, original), (original, trace)])
    if form == "explorer":
        page(explore(first, second).to_html(whole_page=True))
        return
    told = render(first, form, lang=lang, against=second)
    if form == "html":
        page(told, scripts=1)
        return
    shown(told)
    if form == "json":
        data = json.loads(told, parse_constant=refuse)
        VALIDATOR.validate(data)
        ast.parse((data["reproduce"] or {"script": ""})["script"])


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def case(seed: int, sources: list[pathlib.Path], originals: list[Trace], place: pathlib.Path) -> tuple[str, Told]:
    """One damaged trace; the way it was damaged, and what became of it."""
    draw = random.Random(seed)
    source = draw.randrange(len(sources))
    folder = place / "trace"
    folder.mkdir()
    way = draw.choice(WAYS)
    try:
        for file in sources[source].glob("rank-*.jsonl"):
            lines = file.read_bytes().splitlines(keepends=True)
            if draw.random() < 0.7:
                way(lines, draw)
            (folder / file.name).write_bytes(b"".join(lines))
        return way.__name__, use(folder, originals[source], place / "out", draw)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def run(count: int, sources: list[pathlib.Path], seed: int = 0) -> tuple[Counter[str], list[str]]:
    """So many cases; how they ended, and the faults found."""
    originals = [open_trace(source) for source in sources]
    ends: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(seed, seed + count):
            limit(SECONDS)
            try:
                way, told = case(number, sources, originals, pathlib.Path(name))
                ends[f"{way}: {told.end}{' with problems stated' if told.problems else ''}"] += 1
            except Exception:
                faults.append(f"case {number}: {traceback.format_exc()}")
            finally:
                limit(0)
    return ends, faults


def limit(seconds: int) -> None:
    """Ends what takes so long; by the clock ten times as long, since a busy machine is no fault. 0: nothing."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("sources", nargs="+", type=pathlib.Path, metavar="TRACE", help="folders of real traces")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for signum in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signum, _too_long)
    began = time.monotonic()
    ends, faults = run(args.count, args.sources, args.seed)
    for end, count in sorted(ends.items()):
        print(f"{count:7,}  {end}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    took = time.monotonic() - began
    print(f"{args.count:,} cases in {took:.0f} s, at most {peak} MB, {len(faults)} faults")
    for fault in faults[:10]:
        print(f"\n{fault}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
