"""Reads exceptions out of a job's log: which rank failed first, where, with what.

Lines of many processes come mixed. `prefixes` tells whose line it is, and each process's lines are read as a stream of
their own. What merely reports another's failure (launchers, closed connections) is set aside. Memory follows what is
told of, never the log's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diagkit.diagnosis.containers import unwrapped
from diagkit.diagnosis.explain import Explanation, by_text
from diagkit.diagnosis.operation import operation_of
from diagkit.diagnosis.prefixes import MARKER, Prefixes, rank_in
from diagkit.diagnosis.signatures import said
from diagkit.trace.schema import Failure

#: Longest line that is looked at, and most frames kept of a traceback.
LINE_LIMIT = 20_000
FRAME_LIMIT = 500
#: Most errors kept, those with a known text counted apart; most streams; most frames of open tracebacks in all.
ERROR_LIMIT, STREAM_LIMIT, OPEN_LIMIT = 1_000, 20_000, 200_000

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_STAMP = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*Z?\]? ?(?:\[?(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\]?:? ?)?"
)
_GROUP_RULE = re.compile(r"^ {0,40}\+[-+]{2}")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]{0,1000})", line (?P<line>\d{1,9}), in (?P<function>.{1,300}?)\s*$')
_NAME = r"(?:[A-Za-z_]\w*\.){0,12}[A-Za-z_]\w*"
_EXCEPTION = re.compile(
    rf"^(?P<type>{_NAME}(?:Error|Exception|Interrupt|Exit|Failure|Warning)(?:\([\w.]+\))?)(?:: ?(?P<text>.*))?$"
)
#: At the end of a traceback any class with a package is an exception: "diagkit.errors.MoveBlocked: ...".
_RAISED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.){1,12}[A-Z]\w*)(?:: (?P<text>.*))?$")
#: A line that some logger wrote: a level, glog's stamp, a bracketed time, our own.
_LOGGED = re.compile(
    r"^(?:[IWEF]\d{4} |\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b"
    r"|\[?\d{4}-\d\d-\d\d[ T]|\[?\d\d:\d\d:\d\d|diagkit: )"
)
_PID = re.compile(r"pid=(\d+)")
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_ROOT_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d{1,6})")
_RANK_WORD = re.compile(r"\brank[ =:]{1,3}(?P<rank>\d{1,6})\b", re.IGNORECASE)

#: Exceptions that only report another process's end.
_ECHOES = re.compile(
    r"ChildFailedError|CalledProcessError|ActorDiedError|RayActorError|WorkerCrashedError|KeyboardInterrupt|SystemExit"
    r"|SignalException|BrokenPipe"
)
_ECHO_TEXTS = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket timeout|watchdog|received signal"
    r"|remote process exited",
    re.IGNORECASE,
)


@dataclass(slots=True)
class LoggedError:
    """One exception of a log. ``where``: the innermost line outside site-packages and torch, "train.py:41 save"."""

    stream: str
    number: int  # line of the log, from 1
    type: str
    message: str
    operation: str = ""
    where: str = ""
    rank: int | None = None
    pid: str = ""
    prefix: str = ""  # what a logger wrote before it

    @property
    def echo(self) -> bool:
        """It only reports that another process failed."""
        return bool(_ECHOES.search(self.type) or _ECHO_TEXTS.search(self.message))

    @property
    def failure(self) -> Failure:
        return Failure(self.type.rpartition(".")[2], self.message, self.operation)


def _where(frames: list[tuple[str, int, str]]) -> str:
    own = [f for f in frames if not re.search(r"site-packages|dist-packages|/torch/|/ray/|lib/python3|<frozen", f[0])]
    file, line, function = (own or [("", 0, "")])[-1]
    return f"{file.rpartition('/')[2]}:{line} {function}" if file else ""


def explain_log(lines: Iterable[str]) -> Explanation | None:
    """What a log's first failure means; None for a log without any exception."""
    reader = _Reader()
    errors = list(reader.errors(unwrapped(lines)))
    if not errors:
        return None
    own = [e for e in errors if not e.echo] or errors
    known = [e for e in own if said(e.message)]
    # A logger's lines carry no rank, and may tell of the first error better than the last one's traceback does.
    from_root = [e for e in known or own if reader.root_rank is not None and e.rank in (None, reader.root_rank)]
    first = (from_root or known or own)[0]
    before = next((e for e in known if e.stream == first.stream and e.number < first.number), None)
    return by_text(
        first.failure,
        first.operation,
        rank=first.rank if first.rank is not None else reader.root_rank,
        where=first.where or next((e.where for e in own if e.number > first.number and e.where), ""),
        earlier=before.failure if before else None,
    )


class _Reader:
    """Streams, and the traceback that is open in each."""

    def __init__(self) -> None:
        self.root_rank: int | None = None
        self._in_root = False
        self._open: dict[str, list[tuple[str, int, str]]] = {}
        self._last: dict[str, LoggedError] = {}
        self._ranks: dict[str, int] = {}
        self._remote: dict[str, str] = {}  # stream -> pid of the worker whose traceback comes next
        self._prefixes = Prefixes()
        self._frames = 0  # of all open tracebacks

    def errors(self, lines: Iterable[str]) -> Iterator[LoggedError]:
        found: list[LoggedError] = []
        kept = {True: 0, False: 0}
        for number, line in enumerate(lines, 1):
            stream, text, outer, prefix = self._prefixes.cut(_ANSI.sub("", line[:LINE_LIMIT]).rstrip("\r\n"))
            self._note_ranks(stream, text)
            if stream != outer and MARKER.match(text):
                self._begin(outer)  # a logger may set its prefix before the first line alone
            last = self._last.get(stream)
            if last is not None and last.prefix != prefix and not text.startswith((" ", "\t")):
                del self._last[stream]  # another message: a logger's time differs, and this is no indented detail
            error = self._read(stream, text, number)
            if error is not None:
                error.prefix = prefix
            if error is not None and kept[known := self._names_text(error.message)] < ERROR_LIMIT:
                kept[known] += 1
                found.append(error)
            if len(self._open) > STREAM_LIMIT or self._frames > OPEN_LIMIT:
                self._close(next(iter(self._open)))
            if len(self._last) > STREAM_LIMIT:
                del self._last[next(iter(self._last))]
        for error in found:
            if error.rank is None:
                error.rank = self._ranks.get(error.stream, self._rank_of(error.pid))
        return iter(found)

    def _rank_of(self, pid: str) -> int | None:
        found = (rank for who, rank in self._ranks.items() if pid and pid in _PID.findall(who))
        return next(found, None)

    def _begin(self, stream: str) -> None:
        """A traceback begins."""
        self._close(stream)
        self._open[stream] = []
        self._last.pop(stream, None)

    def _close(self, stream: str) -> list[tuple[str, int, str]]:
        frames = self._open.pop(stream, [])
        self._frames -= len(frames)
        return frames

    def _note_ranks(self, stream: str, text: str) -> None:
        if _ROOT_CAUSE.search(text):
            self._in_root = True
        elif self._in_root and (found := _ROOT_RANK.match(_STAMP.sub("", text))):
            if self.root_rank is None:
                self.root_rank = int(found["rank"])
            self._in_root = False
        if not stream or len(self._ranks) > STREAM_LIMIT:
            return
        if (rank := rank_in(stream)) is not None:
            self._ranks[stream] = rank
        elif stream not in self._ranks and (found := _RANK_WORD.search(f"{stream} {text}")):
            self._ranks[stream] = int(found["rank"])

    def _read(self, stream: str, text: str, number: int) -> LoggedError | None:
        if MARKER.match(text):
            self._begin(stream)
            return None
        frames = self._open.get(stream)
        if frames is not None and (found := _FRAME.match(text)):
            if len(frames) < FRAME_LIMIT:
                frames.append((found["file"], int(found["line"]), found["function"]))
                self._frames += 1
            return None
        plain = _STAMP.sub("", text)
        if task := _PID.search(plain.partition("RayTaskError")[2].partition("ray::")[2]):
            # What follows is the remote traceback, without a heading, in the driver's own lines.
            self._begin(stream)
            self._remote[stream] = task[1]
            return None
        found = _EXCEPTION.match(plain) or (_RAISED.match(plain) if frames else None)
        if found and (frames or self._names_text(found["text"] or "")):
            operation = operation_of((file, function) for file, _, function in frames or ())
            message = (found["text"] or "")[:4000]
            error = LoggedError(stream, number, found["type"], message, operation, _where(frames or []))
            error.pid = self._remote.pop(stream, "")
            self._close(stream)
            self._last[stream] = error
            return error
        last = self._last.get(stream)
        if last is not None and frames is None:
            # A message may go on over lines; what a launcher says next does not belong to it.
            other = _STAMP.match(text) or _LOGGED.match(text) or _GROUP_RULE.match(text)
            if text.strip() and len(last.message) < 2000 and not other:
                last.message += "\n" + text[:2000]
            else:
                self._last.pop(stream)
        return None

    @staticmethod
    def _names_text(text: str) -> bool:
        return bool(said(text))
