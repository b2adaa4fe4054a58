"""Tensors gathered into the lines of a map: one line for all that share a pattern of names and a history.

The rules: a line stands for exactly the tensors it names; what does not fit on a page is told by number, and a history
that holds a split is never the one that is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diagkit.trace.patterns import compress
from diagkit.trace.schema import BUFFER, PARAMETER
from diagkit.views.scene import clean
from diagkit.views.story import Cell, Story, Tensor, named

__all__ = ["Line", "Page", "gather"]


@dataclass(frozen=True, slots=True)
class Line:
    """``histories[s]`` are the cells in story ``s``, None where that story knows no such tensor."""

    label: str
    kind: str
    count: int
    histories: tuple[tuple[Cell | None, ...] | None, ...]

    @property
    def remark(self) -> str:
        """What stands beside the label: ``"×112"``, ``"buffer"``, ``"buffer ×2"``."""
        words = [] if self.kind == PARAMETER else [self.kind.replace("_", " ") if self.kind == BUFFER else ""]
        words += [f"×{self.count:,}"] if self.count > 1 else []
        return " ".join(word for word in words if word)

    @property
    def split(self) -> bool:
        return any(cell.split for history in self.histories if history for cell in history if cell)


@dataclass(frozen=True, slots=True)
class Page:
    """The lines, and how many tensors none of them shows."""

    lines: tuple[Line, ...]
    left_out: int


def gather(stories: Sequence[Story], expand: bool | str | Iterable[str] = (), limit: int = 24) -> Page:
    """One line per pattern of names and history, over all stories together.

    ``expand`` names tensors that get a line each: True for all, or shell patterns such as ``"*.q_proj.*"``; a name that
    holds the text counts too.
    """
    found: dict[Tensor, list[tuple[int, ...] | None]] = {}
    for s, story in enumerate(stories):
        for tensor, numbers in zip(story.tensors, story.histories, strict=True):
            found.setdefault(tensor, [None] * len(stories))[s] = numbers
    order = {tensor: i for i, tensor in enumerate(found)}
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor, numbers_of in found.items():
        kind, model, name, part = tensor
        single = name if _expanded(name, expand) else None
        groups.setdefault((kind, model, part, tuple(numbers_of), single), []).append(tensor)
    several = len({model for _, model, _, _ in found}) > 1
    placed: list[tuple[int, Line, str, str]] = []
    for tensors in groups.values():
        kind, model, _, part = tensors[0]
        histories = tuple(_cells(story, n) for story, n in zip(stories, found[tensors[0]], strict=True))
        for pattern in compress(name for _, _, name, _ in tensors):
            name = f"{model}: {pattern.text}" if several else pattern.text
            first = order[(kind, model, pattern.names[0], part)]
            placed.append((first, Line("", kind, pattern.count, histories), name, part))
    lines = _join_parts(placed)
    return Page(tuple(lines), 0) if len(lines) <= limit else _fit(lines, limit)


def _join_parts(placed: list[tuple[int, Line, str, str]]) -> list[Line]:
    """Parts of one optimizer's state that live alike become one line: ``w [exp_avg, exp_avg_sq]``."""
    joined: dict[tuple[object, ...], tuple[Line, str, list[str]]] = {}
    for _, line, name, part in sorted(placed, key=lambda entry: entry[0]):
        key = (name, line.kind, line.count, line.histories)
        joined.setdefault(key, (line, name, []))[2].append(part)
    return [
        replace(line, label=_label(line.kind, name, ", ".join(filter(None, parts))), count=line.count * len(parts))
        for line, name, parts in joined.values()
    ]


def _fit(lines: list[Line], limit: int) -> Page:
    """The lines that tell most; the others in lumps by kind and history, so that no history is lost if that can be."""
    ranked = sorted(range(len(lines)), key=lambda i: (not lines[i].split, -lines[i].count, i))
    kept = limit
    while True:
        rest = [lines[i] for i in sorted(ranked[kept:])]
        lumps: dict[tuple[object, ...], list[Line]] = {}
        for line in rest:
            lumps.setdefault((line.kind, line.histories), []).append(line)
        if kept + len(lumps) <= limit or kept <= limit // 2:
            break
        kept = max(limit // 2, limit - len(lumps))
    room = limit - kept
    by_weight = sorted(lumps.values(), key=lambda group: (not group[0].split, -sum(line.count for line in group)))
    shown = [lines[i] for i in sorted(ranked[:kept])] + [_lump(group) for group in by_weight[:room]]
    return Page(tuple(shown), sum(line.count for group in by_weight[room:] for line in group))


def _lump(group: list[Line]) -> Line:
    if len(group) == 1:
        return group[0]
    count = sum(line.count for line in group)
    noun = {PARAMETER: "parameters", BUFFER: "buffers"}.get(group[0].kind, f"{group[0].kind.replace('_', ' ')} tensors")
    return Line(f"{count:,} more {noun}", PARAMETER, 1, group[0].histories)


def _cells(story: Story, numbers: tuple[int, ...] | None) -> tuple[Cell | None, ...] | None:
    return None if numbers is None else tuple(story.cells[n] for n in numbers)


def _label(kind: str, text: str, part: str) -> str:
    text = clean(text) or "(no name)"
    return text if kind in (PARAMETER, BUFFER) else f"{text} [{clean(part) or kind.replace('_', ' ')}]"


def _expanded(name: str, expand: bool | str | Iterable[str]) -> bool:
    return expand if isinstance(expand, bool) else named(name, expand)
