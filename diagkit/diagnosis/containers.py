"""Takes a job's lines out of what a container engine wraps around them.

Docker's JSON files hold an object a line, ``{"log": ..., "stream": ..., "time": ...}``; Kubernetes (CRI) writes
``TIME stderr F LINE``. Both cut long lines into pieces: Docker leaves the newline off all but the last, CRI marks them
``P``. Pieces of one stream are joined; what a line says of its stream stays in front of it, since the two are mixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

#: Characters of one line that are kept waiting for its end; more are handed on as they are.
PIECES_LIMIT = 1 << 16

_CRI = re.compile(r"(?P<head>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?P<stream>stdout|stderr) )(?P<tag>[PF]) ")


def unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a log; those of a container engine whole and without its wrapping.

    >>> list(unwrapped(['{"log":"boom\\\\n","stream":"stderr"}', "as it is"]))
    ['stderr boom', 'as it is']
    """
    waiting: dict[str, str] = {}
    for line in lines:
        head, stream, text, ends = _parts(line)
        if not stream:
            yield line
        elif ends or len(waiting.get(stream, "")) + len(text) > PIECES_LIMIT:
            yield head + waiting.pop(stream, "") + text
        else:
            waiting[stream] = waiting.get(stream, "") + text
    for stream, text in waiting.items():
        yield f"{stream} {text}"


def _parts(line: str) -> tuple[str, str, str, bool]:
    """What stays in front, the stream ("" for a line that nobody wrapped), the text, and whether it ends the line."""
    if line.startswith("{"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return "", "", line, True
        text, stream = event.get("log"), event.get("stream", "log")
        if isinstance(text, str) and stream in ("stdout", "stderr", "log"):
            return f"{stream} ", stream, text.rstrip("\r\n"), text.endswith("\n")
    elif found := _CRI.match(line):
        return f"{found['head']}F ", found["stream"], line[found.end() :].rstrip("\r\n"), found["tag"] == "F"
    return "", "", line, True
