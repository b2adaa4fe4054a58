"""Whose line of a log it is, and what it says without what a launcher or a logger put before it.

Known marks of processes (torchrun, Ray, srun) are cut off wherever they stand. Every other prefix (a container's time
stamp, a logger's name, a node's) is learnt from the line on which a traceback begins: what stands before the marker
stands before the other lines of that traceback as well, but for times and numbers.
"""

from __future__ import annotations

import re

_KNOWN = (
    re.compile(r"^\[(?:rank|default)(?P<rank>\d{1,6})\]:? ?"),
    re.compile(r"^\((?P<who>[^()]{0,200}?pid=\d+[^()]{0,200})\) ?"),
    re.compile(r"^(?P<rank>\d{1,6}): (?= *(?:Traceback|File |\w+Error|raise |  ))"),  # srun --label
)
MARKER = re.compile(r"(?:Exception Group )?Traceback \(most recent call last\):")
#: What stands before the lines of an exception group, or of a mail that quotes one.
_GUTTER = re.compile(r"^(?:> ?)*(?:(?: {0,40}\| ?)|(?: {0,40}\+ (?=Exception Group )))?")
_GROUP_MARK = re.compile(r"  \+ $")
_TIME = (
    r"\d{4}[-/]\d\d[-/]\d\d|\d\d-\d\d(?= \d\d:)|[IWEF]\d{4}(?= \d\d:)"
    r"|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
)
_TIMES = re.compile(_TIME)
_PIECES = re.compile(rf"(?P<time>{_TIME})|(?P<number>\d+)|(?P<other>\D)")
_RANK = re.compile(r"\[(?:rank|default)(\d{1,6})\]|\brank[ =:_-]{0,3}(\d{1,6})\b", re.IGNORECASE)

#: Longest prefix, and most of them, that are learnt from one log.
PREFIX_LIMIT, SHAPE_LIMIT = 300, 100


class Prefixes:
    """Cuts lines into whose they are and what they say; learns as it goes."""

    def __init__(self) -> None:
        self._shapes: dict[str, dict[str, re.Pattern[str]]] = {}
        self._indents: dict[str, str] = {}
        self._count = 0

    def cut(self, line: str) -> tuple[str, str, str, str]:
        """The stream of a line, what it says, the stream of the lines that go on without its learnt prefix, and that
        prefix.

        >>> Prefixes().cut("[rank3]: boom")
        ('rank 3', 'boom', 'rank 3', '')
        """
        outer, text = _known(line)
        stream, cut = outer, ""
        for shape in self._shapes.get(outer, {}).values():
            if found := shape.match(text):
                cut = found[0]
                stream, text = _stream(outer, cut), text[found.end() :]
                break
        text = text[_end(_GUTTER.match(text)) :]
        marker = MARKER.search(text)
        if marker is not None:
            before = _GROUP_MARK.sub("", text[: marker.start()])
            text = text[marker.start() :]
            if not before.strip():
                self._indents[stream] = before
            elif stream == outer and len(before) <= PREFIX_LIMIT:
                self._learn(outer, before)
                stream, cut = _stream(outer, before), before
                self._indents.pop(stream, None)
            if len(self._indents) > 10 * SHAPE_LIMIT:
                self._indents.clear()
        elif indent := self._indents.get(stream, ""):
            text = text.removeprefix(indent)
        return stream, text, outer, cut

    def _learn(self, outer: str, prefix: str) -> None:
        pattern = "".join(map(_generalised, _PIECES.finditer(prefix)))
        known = self._shapes.setdefault(outer, {})
        if pattern not in known and self._count < SHAPE_LIMIT:
            self._count += 1
            known[pattern] = re.compile(pattern)


def rank_in(stream: str) -> int | None:
    """The rank that a stream's name tells, if it tells one.

    >>> rank_in("node1: [rank5]:"), rank_in("worker-0:")
    (5, None)
    """
    found = _RANK.search(stream)
    return int(found[1] or found[2]) if found else None


def _known(line: str) -> tuple[str, str]:
    stream, text = "", line
    for _ in range(3):
        for prefix in _KNOWN:
            found = prefix.match(text)
            if found:
                groups = found.groupdict()
                stream = groups.get("who") or f"rank {groups['rank']}"
                text = text[found.end() :]
                break
        else:
            break
    return stream, text


def _stream(outer: str, prefix: str) -> str:
    """Times differ from line to line; everything else says whose line it is."""
    return f"{outer} {' '.join(_TIMES.sub('', prefix).split())}".strip()


def _generalised(piece: re.Match[str]) -> str:
    if piece["time"]:
        return f"(?:{_TIME})"
    return r"\d{1,18}" if piece["number"] else re.escape(piece["other"])


def _end(found: re.Match[str] | None) -> int:
    return found.end() if found else 0
