"""The residency map: where each tensor's metadata and bytes are, moment by moment; and two runs of it side by side.

The rules: what is healthy is plain, only what is wrong has contrast; a device's name is written where it changes and
nowhere else; a cause stands under the moment at which it struck.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from diagkit.trace.merged import Trace
from diagkit.trace.reader import RankTrace
from diagkit.views import cells, palette, words
from diagkit.views.chosen import one_rank, opened
from diagkit.views.figure import ViewFigure
from diagkit.views.lines import Line, Page, gather
from diagkit.views.panels import GAP, MARGIN, Panel, head, moments_below, notes_below, tone
from diagkit.views.scene import Scene, Text, shorten, text_width, wrap
from diagkit.views.story import Story, tell
from diagkit.views.verdict import Verdict, context, judge

__all__ = ["before_after", "residency_map"]

LABEL = 11.5  # size of names
PANEL_GAP = 34.0


def residency_map(
    trace: Trace | RankTrace | str | os.PathLike[str],
    *,
    rank: int | None = None,
    phase: str | None = None,
    moments: int | Sequence[int] = 8,
    only: str | Iterable[str] | None = None,
    expand: bool | str | Iterable[str] = (),
    kinds: Iterable[str] = ("parameter", "buffer"),
    rows: int = 24,
    title: str | None = None,
    width: int = 1000,
) -> ViewFigure:
    """Where every tensor lived, by its metadata and by its bytes, at the moments that matter.

    Args:
        trace: a trace, one rank of it, the path of one, or what `inspect` returned.
        rank: whose; unless given, the lowest of those that met the first failure, else the lowest.
        phase: only this phase, by name.
        moments: at most so many moments, or the indices of those to show.
        only: tensors whose names match this shell pattern, or one of these, or hold the text; None for all.
        expand: names (or shell patterns) that get a row each instead of sharing a pattern; True for all.
        kinds: kinds of tensor, of `diagkit.trace.schema.TENSOR_KINDS`.
        rows: at most so many rows; what is left out is counted.
        title: in place of the sentence that the figure finds by itself.
        width: in pixels at 100 dpi; more where the moments need it.

    Raises:
        UsageError: no trace; no such phase, moment or kind, or nothing to show.
        TraceError: nothing at that path is a trace.
    """
    trace = opened(trace)
    one = one_rank(trace, rank)
    story = tell(one, phase=phase, moments=moments, kinds=tuple(kinds), only=only)
    verdict = judge(story)
    alike = words.other_ranks(trace, story, phase, only) if isinstance(trace, Trace) else ""
    lines = gather([story], expand, rows)
    around = context(story) + (f" · {alike}" if alike else "")
    return _draw([(story, verdict, "")], lines, title or verdict.title, around, width)


def before_after(
    before: Trace | RankTrace | str | os.PathLike[str],
    after: Trace | RankTrace | str | os.PathLike[str],
    *,
    names: tuple[str, str] = ("Unguarded", "Guarded"),
    rank: int | None = None,
    phase: str | None = None,
    moments: int | tuple[Sequence[int], Sequence[int]] = 5,
    only: str | Iterable[str] | None = None,
    expand: bool | str | Iterable[str] = (),
    kinds: Iterable[str] = ("parameter", "buffer"),
    rows: int = 24,
    title: str | None = None,
    width: int = 1080,
) -> ViewFigure:
    """Two runs beside each other, with the same rows: what the guard changes. Arguments as for `residency_map`.

    Raises:
        UsageError: no trace; no such phase, moment or kind, or nothing to show.
        TraceError: nothing at that path is a trace.
    """
    before, after = opened(before), opened(after)
    chosen: tuple[int | Sequence[int], ...] = (moments, moments) if isinstance(moments, int) else moments
    wanted = tuple(kinds)
    told = []
    first = one_rank(before, rank).rank  # the same one of both, wherever it is there
    for trace, name, which in zip((before, after), names, chosen, strict=True):
        one = one_rank(trace, first if isinstance(trace, Trace) and first in trace.ranks else rank)
        story = tell(one, phase=phase, moments=which, kinds=wanted, only=only)
        told.append((story, judge(story), name))
    lines = gather([story for story, _, _ in told], expand, rows)
    found = "; ".join(
        f"{name if i == 0 else name.lower()}, {verdict.short}" for i, (_, verdict, name) in enumerate(told)
    )
    contexts = [context(story).split(" · ") for story, _, _ in told]
    shared = [word for word in contexts[0] if word in contexts[1]]
    own = [" · ".join(word for word in words_ if word not in shared) for words_ in contexts]
    return _draw(told, lines, title or found, " · ".join(shared), width, own)


def _draw(
    told: Sequence[tuple[Story, Verdict, str]],
    lines: Page,
    title: str,
    around: str,
    width: float,
    own: Sequence[str] = ("",),
) -> ViewFigure:
    side_by_side = len(told) > 1
    labels, label_width, remark_width = _labels(lines.lines, 250 if side_by_side else 330)
    left = MARGIN + label_width + 12 + remark_width + (14 if remark_width else 4)
    count = sum(len(story.columns) for story, _, _ in told)
    gaps = PANEL_GAP * (len(told) - 1)
    pitch = min(max((width - left - MARGIN - gaps + GAP * len(told)) / count, 56.0), 104.0)
    panels = []
    for (story, verdict, name), circumstances in zip(told, own, strict=True):
        panels.append(Panel(story, verdict, name, circumstances, left, pitch))
        left += pitch * len(story.columns) - GAP + PANEL_GAP
    width = max(width, left - PANEL_GAP + MARGIN)
    scene = Scene(width, 0, title, words.map_text(title, around, told, lines))
    if side_by_side:
        y = _panel_heads(scene, panels, head(scene, title, around))
    else:
        y = head(scene, title, around, told[0][1].sentence, tone(told[0][1]))
    y = _rows(scene, panels, lines.lines, labels, MARGIN + label_width, remark_width, y)
    y = moments_below(scene, panels, y)
    y = notes_below(scene, panels, y)
    passing = [(words.passing(story), len(story.columns), story) for story, _, _ in told]
    faults = any(
        column.splits and c not in quiet for quiet, _, story in passing for c, column in enumerate(story.columns)
    )
    y = cells.legend(scene, MARGIN, y + 18, _shown(lines.lines), faults, any(quiet for quiet, _, _ in passing))
    if remark := words.left_out(told, lines):
        for line in wrap(remark, width - 2 * MARGIN, 11, 2):
            scene.add(Text(MARGIN, y + 14, line, 11, palette.MUTED))
            y += 16
    scene.height = y + 14
    return ViewFigure(scene)


def _labels(lines: Sequence[Line], limit: float) -> tuple[list[list[str]], float, float]:
    """Names on one or two lines, and the widths that names and remarks need."""
    labels = [_label(line.label, limit) for line in lines]
    label_width = max((text_width(part, LABEL) for parts in labels for part in parts), default=0.0)
    return labels, label_width, max((text_width(line.remark, 10.5) for line in lines), default=0.0)


def _label(text: str, limit: float) -> list[str]:
    """One line, or two of lengths as alike as the dots allow."""
    if text_width(text, LABEL) <= limit:
        return [text]
    part = text.rfind(" [") + 1
    dots = [part] if part else [i + 1 for i, character in enumerate(text) if character == "."]
    cut = min(dots, key=lambda i: max(text_width(text[:i], LABEL), text_width(text[i:], LABEL)), default=0)
    return [shorten(part, limit, LABEL) for part in (text[:cut].rstrip(), text[cut:]) if part]


def _panel_heads(scene: Scene, panels: Sequence[Panel], y: float) -> float:
    bottom = y
    for panel in panels:
        colour = tone(panel.verdict)
        scene.add(Text(panel.left, y + 12, shorten(panel.name, panel.width, 15, True), 15, bold=True))
        at = y + 14
        if panel.own:
            at += 15
            scene.add(Text(panel.left, at, shorten(panel.own, panel.width, 11), 11, palette.MUTED, tip=panel.own))
        for part in wrap(words.panel_verdict(panel.verdict), panel.width, 12, 8):
            at += 17
            scene.add(Text(panel.left, at, part, 12, colour, tip=panel.verdict.sentence))
        bottom = max(bottom, at)
    return bottom + 16


def _rows(
    scene: Scene,
    panels: Sequence[Panel],
    lines: Sequence[Line],
    labels: Sequence[list[str]],
    right: float,
    remark: float,
    y: float,
) -> float:
    for line, parts in zip(lines, labels, strict=True):
        height = 24.0 if len(parts) == 1 else 30.0
        middle = y + height / 2
        for i, part in enumerate(parts):
            offset = 4.0 if len(parts) == 1 else -2.5 + 13.5 * i
            scene.add(Text(right, middle + offset, part, LABEL, anchor="end", tip=line.label))
        if line.remark:
            scene.add(Text(right + 12 + remark, middle + 4, line.remark, 10.5, palette.MUTED, anchor="end"))
        for panel, history in zip(panels, line.histories, strict=True):
            before = None
            passing = words.passing(panel.story)
            for c, column in enumerate(panel.story.columns):
                cell = history[c] if history else None
                name = f"{line.label} ({line.remark})" if line.remark else line.label
                tip = f"{name}, {words.moment_name(column)}: {cell or 'not there'}"
                cells.draw(
                    scene,
                    panel.left + panel.pitch * c,
                    y,
                    panel.cell,
                    height,
                    cell,
                    cells.Look(cell != before, c not in passing, tip),
                )
                before = cell
        y += height + 7
    return y


def _shown(lines: Sequence[Line]) -> list[cells.Cell]:
    found = (cell for line in lines for history in line.histories if history for cell in history if cell is not None)
    return list(dict.fromkeys(found))
