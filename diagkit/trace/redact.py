"""Takes what is private out of a trace, so that it can be shown to strangers: hosts, users, paths, addresses, secrets.

The rules: one original always becomes the same word (``HOST1``, ``USER1``, ``PATH2``), on every rank and in every
text, so that what belonged together still does; what a diagnosis needs stays (devices, versions, the calls, the name
of a source file, the line and its code); where a text could be private, it is taken for private. Parameter names are
kept unless asked for; then every word of them becomes ``n1``, ``n2``, ..., and numbers stay, so that layers still fold.
"""

from __future__ import annotations

import argparse
import copy
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import Cause, Facts, Failure, Frame, GroupFacts, Header, Residency, Row

__all__ = ["Redactor", "add_arguments", "asked", "redacted"]

T = TypeVar("T")

_SECRET = r"token|secret|passw(?:or)?d|passphrase|credential|cookie|(?:api|access|private|auth)[_-]?key"
_SECRET_NAME = rf"[\w-]{{0,40}}(?:{_SECRET})[\w-]{{0,40}}"
_TAIL = r"[^\s/\\\"'<>:,;()\[\]{}|]+"
#: What stands between a name and its value, and values that are no name of anybody's.
_IS = r"[\"']?\s*[=:]\s*[\"']?"
_PLAIN = r"(?!(?:\d+|0x\w*|None|True|False|localhost|cpu|npu|cuda|xpu)\b)"
#: Endings of host names. Those that are also names in programs (`self.net`) are taken for such there.
_ENDINGS = "com|org|edu|gov|cn|de|uk|fr|jp|kr|ru|eu|tw|hk|sg|ch|nl|se|au|ca|internal|intranet|corp|lan|cluster\\.local"
_SHORT_ENDINGS = "io|ai|net|dev|cloud|co|us|local|tech|app|xyz"
#: What is private by its form, in the order in which it is looked for at one place of a text. Words are looked at from
#: their beginning alone, so that a hostile text costs no more than its length.
_FORMS = {
    "secret": rf"(?:(?<![\w-])(?:(?i:{_SECRET_NAME})|[A-Z][A-Z0-9_]{{0,40}}(?:KEY|PASS|PWD|AUTH)){_IS}"
    rf"|(?<![\w-])(?i:authorization{_IS}(?:[\w-]{{1,20}}[ ]+)?|bearer[ ]+))"
    r"(?P<value>(?<=[\"'])[^\"'\n]+(?=[\"'])|(?!\d+\b)[^\s\"',;&]{4,})",
    "known_secret": r"\b(?:hf|gh[opsu]|github_pat|sk|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?",
    "url": r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s\"'<>]+",
    "account": r"(?<![\w.+-])(?P<user>[\w.+-]+)@(?P<at>\w[\w.-]*\w)",
    "quoted": r"(?P<quote>[\"'])(?P<inside>(?:~[\w-]*|[A-Za-z]:|\.{1,2})?[/\\][^\"'\n]+)(?P=quote)",
    "a_host": rf"(?<![\w-])(?i:[\w-]{{0,40}}(?:addr(?:ess)?|host(?:name)?|server|node|machine))(?:[\"']?\s*=\s*[\"']?"
    rf"|[\"']?:\s*[\"']?(?=[\w.-]*\d)){_PLAIN}(?P<the_host>\w[\w.-]*\w)",
    "a_user": r"(?<![\w-])(?i:[\w-]{0,20}user(?:name)?|owner|login)[\"']?\s*=\s*[\"']?"
    rf"{_PLAIN}(?P<the_user>\w[\w.-]+)",
    "share": rf"\\\\{_TAIL}(?:\\{_TAIL})+",
    "drive": rf"\b[A-Za-z]:[\\/](?:{_TAIL}[\\/]?)*(?:[ ]{_TAIL}[\\/](?:{_TAIL}[\\/]?)*)*",
    "backward": r"(?<![\w.~/\\-])[\w.-]+(?:(?:\\\w[\w.-]*){2,}|\\\w[\w-]*\.\w{1,12}\b)",
    "relative": r"(?<![\w.~/\\-])[\w.-]+(?:/[\w.-]+)*/[\w.-]+(?:\.\w{1,12}\b|/[\w.-]*)",
    "path": rf"(?<![\w.~/)\]}}])(?:~[\w-]*|\.{{1,2}})?/(?:{_TAIL}/?)+(?:[ ]{_TAIL}/(?:{_TAIL}/?)*)*",
    "mac": r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b",
    "ip": r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)"
    r"|(?<![\w:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])",
    "service": r"(?<![\w.-])(?![\w.-]*\.py:)(?=[\w.-]*[A-Za-z])[\w.-]+:\d{4,5}\b",
    "domain": rf"(?<![\w.-])(?i:(?:[a-z0-9-]+\.)+(?:(?:{_ENDINGS})\b|(?:{_SHORT_ENDINGS})\b(?!\.?\w|[(\[]|\s*=)))"
    r"|(?<![\w.-])(?=[a-zA-Z0-9.]*-)(?:[a-zA-Z0-9-]+\.){2,}[a-zA-Z]{2,}\b(?![.-]?\w)",
}
_HOME = re.compile(r"(?:/(?:home|Users)/|[/\\]Users[/\\]|~)(?P<user>[\w.+-]{2,})")
_CODE = re.compile(r"[^/\\]+\.(?:py|ipynb|cpp|cu|cc|h)", re.IGNORECASE)
_NOTEBOOK = re.compile(r"ipykernel_|<ipython-input")
_FILE = re.compile(
    r".*\.(?:py|ipynb|sh|cpp|cu|cc|pt|pth|bin|ckpt|safetensors|json|jsonl|ya?ml|toml|txt|log|gz|whl|zip)"
)
_USER_KEY = re.compile(r"user|owner|mail|login|account|author", re.IGNORECASE)
_HOST_KEY = re.compile(r"host|node|server|machine|cluster", re.IGNORECASE)

#: Users whose name says nothing, and words of parameter names that everybody uses or that a diagnosis reads.
_NOBODY = frozenset({"root", "user", "ubuntu", "runner", "nobody", "admin", "model", "home", "shared", "public"})
_COMMON_WORDS = """
weight bias model module parameter parameters buffer tensor storage device devices cpu npu cuda meta grad gradient step
init train save load export move forward backward data type set to of a on the for with and is no at not be has from
same different expected found all least two attempted assign attempting associated backend couldn swap FSDP FSDPParam
attribute object param_dtype orig_dtype reduce_dtype materialized when enabling offloading CPU got mixed torch Tensor
DTensor should t
"""
_COMMON = frozenset(_COMMON_WORDS.split())
#: How a dotted name in a program begins, that could be taken for a host's: `self.net`.
_PROGRAMS = frozenset(
    ("self", "cls", "model", "module", "torch", "nn", "np", "dist", "os", "sys", "args", "config", "engine", "trainer")
)


def redacted(trace: Trace, names: bool = False) -> Trace:
    """A copy of the trace without what is private; ``names``: parameter names are private, too."""
    return Redactor(names).traces(trace)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redact", action="store_true", help="take hosts, users, paths, addresses and secrets out")
    parser.add_argument("--redact-names", action="store_true", help="the same, and take parameter names out, too")


def asked(args: argparse.Namespace, *traces: Trace) -> tuple[Trace, ...]:
    """The traces as the options of `add_arguments` want them: as they are, or redacted with one set of words."""
    if not args.redact and not args.redact_names:
        return traces
    return Redactor(args.redact_names).traces(*traces)


class Redactor:
    """Remembers which word stands for what, for all texts and traces that it is given."""

    def __init__(self, names: bool = False) -> None:
        self.names = names
        self._words: dict[str, dict[str, str]] = {}  # kind -> original -> word
        self._known: dict[str, str] = {}  # private wherever it stands: a host's name -> its word
        self._segments: dict[str, str] = {}  # words of parameter names
        self._modules: set[str] = set()  # dotted names of the models' parts
        self._pattern = re.compile(_alternatives({}))
        self._texts: dict[str, str] = {}
        self._tables: dict[int, tuple[list[Row], list[Row]]] = {}  # by identity; the first keeps it valid

    def traces(self, *traces: Trace) -> tuple[Trace, ...]:
        """The traces without what is private. What one of them gives away is taken out of all."""
        for trace in traces:
            self._learn(trace)
        self._pattern = re.compile(_alternatives(self._known, bool(self._segments)))
        self._texts.clear()
        return tuple(self._trace(trace) for trace in traces)

    def text(self, text: str) -> str:
        """A text of any kind: a message, a label, a line of code."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._pattern.sub(self._replace, text)
        return found

    def path(self, path: str) -> str:
        """A path: its folder becomes a word, the name of a source file stays."""
        if _NOTEBOOK.search(path):
            return "<ipython-input>"
        cut = max(path.rfind("/"), path.rfind("\\")) + 1
        folder, name = path[:cut].rstrip("/\\"), path[cut:]
        if not cut:
            return self.text(path)
        if _CODE.fullmatch(name):
            return f"{self._word('PATH', folder)}/{self.text(name)}"
        return self._word("PATH", path.rstrip("/\\"))

    # ---- what is private in this trace

    def _learn(self, trace: Trace) -> None:
        for rank in trace:
            header = rank.header
            self._know_host(header.host)
            self._know("RUN", header.run)
            self._learn_job(header.job)
            self._learn_modules(rank)
            if self.names:
                self._learn_names(rank)
        if trace.path is not None:
            self._know("RUN", trace.path.name)
        for text in dict.fromkeys(text for rank in trace for part in _told(rank) for text in _strings(part)):
            for user in _HOME.findall(text):
                self._know_user(user)
            for account in re.finditer(_FORMS["account"], text):
                self._know_user(account["user"])
                self._know_host(account["at"])
            for field in re.finditer(_FORMS["a_host"], text):
                if re.search(r"\d", field["the_host"]):  # a name without one may be a word of a program
                    self._know("HOST", field["the_host"])

    def _learn_job(self, job: Mapping[str, Any]) -> None:
        for key, value in job.items():
            if isinstance(value, Mapping):
                self._learn_job(value)
            elif isinstance(value, str) and _USER_KEY.search(str(key)):
                self._know_user(value)
            elif isinstance(value, str) and _HOST_KEY.search(str(key)):
                self._know_host(value)

    def _learn_modules(self, rank: RankTrace) -> None:
        for row in rank.rows:
            name = f"{row.model}.{row.name}"
            while name and name not in self._modules:
                self._modules |= {name, name.partition(".")[2]}
                name = name.rpartition(".")[0]

    def _learn_names(self, rank: RankTrace) -> None:
        for name in dict.fromkeys(text for row in rank.rows for text in (row.model, row.name)):
            for word in re.findall(r"\w+", name):
                if not word.isdigit() and word not in _COMMON:
                    self._segments.setdefault(word, f"n{len(self._segments) + 1}")

    def _know_host(self, name: str) -> None:
        self._know("HOST", name)
        short = name.partition(".")[0]
        if short != name and len(short) > 2 and name in self._known:
            self._known.setdefault(short, self._known[name])

    def _know_user(self, name: str) -> None:
        if name not in _NOBODY:
            self._know("USER", name)

    def _know(self, kind: str, original: str) -> None:
        if len(original) > 2 and original not in _COMMON and original not in self._known:
            self._known[original] = self._word(kind, original)

    def _word(self, kind: str, original: str) -> str:
        words = self._words.setdefault(kind, {})
        return words.setdefault(original, f"{kind}{len(words) + 1}")

    def _replace(self, found: re.Match[str]) -> str:
        text = found[0]
        kind = found.lastgroup or ""
        if kind == "secret":
            return text[: found.start("value") - found.start()] + self._word("SECRET", found["value"])
        if kind in ("a_host", "a_user"):
            its = found["the_host" if kind == "a_host" else "the_user"]
            word = self._known.get(its) or self._word("ADDRESS" if kind == "a_host" else "USER", its)
            return text.removesuffix(its) + word
        if kind == "known":
            return self._known[text]
        if kind == "domain" and self._is_program(text):
            return text
        if kind == "segment":
            return self._segments.get(text, text)
        if kind == "quoted":
            return found["quote"] + self.path(found["inside"]) + found["quote"]
        if kind in ("path", "relative", "drive", "share", "backward"):
            return text if text.strip("/").isdigit() else self.path(text)
        if kind == "ip" and not _is_address(text):
            return text
        return self._word("SECRET" if kind == "known_secret" else "ADDRESS", text)

    def _is_program(self, name: str) -> bool:
        """Whether a dotted name is a file's, or one of a part of a model or of a program."""
        if _FILE.fullmatch(name) or name in self._modules:
            return True
        return "-" not in name and name.partition(".")[0] in _PROGRAMS

    # ---- the copy

    def _trace(self, trace: Trace) -> Trace:
        ranks = {number: self._rank(rank) for number, rank in trace.ranks.items()}
        path = None if trace.path is None else Path(self._word("PATH", str(trace.path)))
        return Trace(ranks, path, tuple(map(self.text, trace._problems)))

    def _rank(self, rank: RankTrace) -> RankTrace:
        new = copy.copy(rank)
        new.path = None if rank.path is None else Path(rank.path.name)
        new.header = self._header(rank.header)
        new.rows = self._table(rank.rows)
        new.facts = [self._facts(facts) for facts in rank.facts]
        new.causes = {number: self._cause(cause) for number, cause in rank.causes.items()}
        new.moments = [
            replace(
                moment,
                label=self.text(moment.label),
                cause=None if moment.cause is None else self._cause(moment.cause),
                failure=None if moment.failure is None else self._failure(moment.failure),
            )
            for moment in rank.moments
        ]
        new.phases = {
            ordinal: replace(
                phase,
                name=self.text(phase.name),
                label=self.text(phase.label),
                calls={self.text(name): count for name, count in phase.calls.items()},
            )
            for ordinal, phase in rank.phases.items()
        }
        new.troubles = list(map(self.text, rank.troubles))
        new.problems = list(map(self.text, rank.problems))
        new.ended = None if rank.ended is None else self.text(rank.ended)
        new.standstill = None if rank.standstill is None else self.text(rank.standstill)
        return new

    def _header(self, header: Header) -> Header:
        argv = []
        for before, word in zip(("", *header.argv), header.argv, strict=False):
            secret = re.fullmatch(rf"(?i)--?{_SECRET_NAME}", before) and not word.startswith("-")
            argv.append(self._word("SECRET", word) if secret else self._argument(word))
        return replace(
            header,
            run=self._word("RUN", header.run) if header.run else "",
            host=self._word("HOST", header.host) if header.host else "",
            argv=tuple(argv),
            device_name=self.text(header.device_name),
            device_uuid=self._word("DEVICE", header.device_uuid) if header.device_uuid else "",
            visible_devices=",".join(map(self._device, header.visible_devices.split(","))),
            job=self._job(header.job),
        )

    def _device(self, name: str) -> str:
        """One of the devices that a process may see: a number stays, the serial number of a card does not."""
        return name if not name or name.strip().isdigit() else self._word("DEVICE", name)

    def _argument(self, word: str) -> str:
        """A word of a command line, or a value of a job's description: with a slash in it, it is a path."""
        option, value = re.fullmatch(r"(?s)((?:-{0,2}[\w.-]+=)?)(.*)", word).groups()  # type: ignore[union-attr]
        if re.search(r"[/\\]", value) and not re.search(r"\s|://|@", value):
            return self.text(option) + self.path(value)
        return self.text(word)

    def _job(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._job(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._job(inner, key) for inner in value]
        if not isinstance(value, str) or not value:
            return value
        return self._word("SECRET", value) if re.fullmatch(rf"(?i){_SECRET_NAME}", key) else self._argument(value)

    def _table(self, rows: list[Row]) -> list[Row]:
        """Ranks that were read together share their list of rows, and go on sharing it."""
        known = self._tables.get(id(rows))
        if known is None:
            new = [replace(r, name=self.text(r.name), model=self.text(r.model), part=self.text(r.part)) for r in rows]
            known = self._tables[id(rows)] = (rows, new)
        return known[1]

    def _facts(self, facts: Facts | None) -> Facts | None:
        # The rest of a record is the schema's own vocabulary, which the rules read.
        reason = getattr(facts, "unreadable", None)
        if not reason or not isinstance(facts, (Residency, GroupFacts)):
            return facts
        return replace(facts, unreadable=self.text(reason))

    def _cause(self, cause: Cause) -> Cause:
        return replace(
            cause,
            operation=self.text(cause.operation),
            chain=tuple(map(self.text, cause.chain)),
            frame=None if cause.frame is None else self._frame(cause.frame),
            stack=tuple(map(self._frame, cause.stack)),
            target=self.text(cause.target),
            request=self.text(cause.request),
        )

    def _frame(self, frame: Frame) -> Frame:
        return Frame(self.path(frame.file), frame.line, self.text(frame.function), self.text(frame.code))

    def _failure(self, failure: Failure) -> Failure:
        return Failure(*map(self.text, (failure.type, failure.message, failure.operation, failure.asks)))


def _alternatives(known: Mapping[str, str], segments: bool = False) -> str:
    forms = {}
    if known:
        longest_first = sorted(known, key=lambda word: (-len(word), word))
        forms["known"] = rf"(?<![^\W_])(?:{'|'.join(map(re.escape, longest_first))})(?![^\W_])"
    forms |= _FORMS
    if segments:
        forms["segment"] = r"\b\w+"
    # The named group around each form is the last to close: `lastgroup` says which form it was.
    return "|".join(f"(?P<{name}>{form})" for name, form in forms.items())


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return len(text) > 2  # "::" is C++


def _told(rank: RankTrace) -> Iterator[object]:
    """The parts of a rank that hold somebody's own texts."""
    yield from (rank.header, rank.problems, rank.troubles, rank.standstill)
    for moment in rank.moments:
        yield from (moment.label, moment.cause, moment.failure)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (str(name), *_strings(inner))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _strings(getattr(value, f.name))
