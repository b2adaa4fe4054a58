"""The rank grid: who differs from whom. Ranks across, patterns of parameters down.

The rules: up to sixteen ranks stand side by side, more are folded into groups that are alike, and a mosaic says which
rank is in which; what most ranks are is plain, what is otherwise has an outline; a rank that is missing or was cut off
is seen to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diagkit.language import msg, tr, trn
from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import Moment
from diagkit.trace.spans import spans_text
from diagkit.views import cells, hatch, palette
from diagkit.views.chosen import Source, opened
from diagkit.views.divergence import Divergence, diverge
from diagkit.views.figure import ViewFigure
from diagkit.views.lines import Page, gather
from diagkit.views.panels import GAP, MARGIN, head
from diagkit.views.scene import Line, Rect, Scene, Text, shorten, text_width, wrap
from diagkit.views.story import Story
from diagkit.views.words import table

__all__ = ["rank_grid"]

SIDE_BY_SIDE = 16
LABEL = 11.5
TILE = 13.0
TILES = 4096  # a mosaic of more says nothing any more
_KEY = msg(
    "Every rank: a letter where it is not in group A, crimson where it was cut off, struck out where it left no trace"
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Column:
    """One rank, or all ranks of a group. ``group`` is -1 for ranks without a trace."""

    name: str
    below: str
    group: int
    bad: bool = False


def rank_grid(
    trace: Source,
    moment: int | str | Moment | None = None,
    *,
    kinds: Iterable[str] = ("parameter", "buffer"),
    rows: int = 24,
    title: str | None = None,
    width: int = 1000,
) -> ViewFigure:
    """Which ranks differ from the others at one moment, and in what. The index of a device is set aside.

    Args:
        trace: a trace, one rank of it, the path of one, or what `inspect` returned.
        moment: a moment of the lowest rank or its index; the name of a phase for its end; None for the last moment of
            every rank.
        kinds: kinds of tensor, of `diagkit.trace.schema.TENSOR_KINDS`.
        rows: at most so many rows; what is left out is counted.
        title: in place of the sentence that the figure finds by itself.
        width: in pixels at 100 dpi; more where the ranks need it.

    Raises:
        UsageError: no trace, no such moment or phase, or nothing to show.
        TraceError: nothing at that path is a trace.
    """
    source = opened(trace)
    whole = Trace({source.rank: source}) if isinstance(source, RankTrace) else source
    found = diverge(whole, moment, kinds)
    columns = _columns(found, whole.world_size)
    order = [max(column.group, 0) for column in columns]
    histories = tuple(zip(*(found.groups[g].state for g in order), strict=True))
    lines = gather([Story(next(iter(whole)), (), (), found.tensors, found.cells, histories)], limit=rows)
    header = whole.header
    device = tr("simulated {device}", device=header.device) if whole.simulated else header.device
    ranks = trn("{count} rank", "{count} ranks", whole.world_size)
    around = " · ".join([tr("at {moment}", moment=tr(found.moment)), ranks, f"torch {header.torch or '?'}", device])
    title = title or _title(found, whole.world_size)
    sentence = _sentence(found, lines)
    scene = Scene(width, 0, title, _text(title, sentence, around, columns, lines, found))
    _draw(scene, columns, lines, found, sentence, around, whole.world_size)
    return ViewFigure(scene)


# ---- what is told


def _columns(found: Divergence, world: int) -> list[Column]:
    if world <= SIDE_BY_SIDE:
        group_of = {rank: g for g, group in enumerate(found.groups) for rank in group.ranks}
        return [_one(found, rank, group_of.get(rank, -1)) for rank in range(world)]
    columns = []
    for g, group in enumerate(found.groups[:SIDE_BY_SIDE]):
        name = f"{LETTERS[g]}: {len(group.ranks):,}"
        columns.append(Column(name, spans_text(group.ranks), g, all(rank in found.ended for rank in group.ranks)))
    return columns


def _one(found: Divergence, rank: int, group: int) -> Column:
    if group < 0:
        return Column(
            f"{rank}", tr("missing") if rank in found.missing else tr("not recorded"), -1, rank in found.missing
        )
    below = found.ended.get(rank, "" if group == 0 else tr("differs"))
    return Column(f"{rank}", below, group, rank in found.ended)


def _title(found: Divergence, world: int) -> str:
    present = sum(len(group.ranks) for group in found.groups)
    if len(found.groups) == 1:
        who = tr("The only rank is here") if world == 1 else tr("All {count} ranks are alike", count=f"{present:,}")
        if present < world:
            who = trn("One rank left a trace", "The {count} ranks that left a trace are alike", present)
    else:
        who = _differ(found)
    lost = [trn("{count} is missing", "{count} are missing", len(found.missing))] if found.missing else []
    lost += [trn("{count} was cut off", "{count} were cut off", len(found.ended))] if found.ended else []
    return "; ".join([who, *lost])


def _differ(found: Divergence) -> str:
    others = [rank for group in found.groups[1:] for rank in group.ranks]
    most = len(found.groups[0].ranks)
    rest = tr("the other {count}", count=f"{most:,}") if most > 1 else tr("rank {rank}", rank=found.groups[0].ranks[0])
    tensors = trn("{count} tensor", "{count} tensors", len(found.differing))
    if len(others) == 1:
        return tr("Rank {rank} differs from {rest} in {tensors}", rank=others[0], rest=rest, tensors=tensors)
    return tr("{count} ranks differ from {rest} in {tensors}", count=f"{len(others):,}", rest=rest, tensors=tensors)


def _sentence(found: Divergence, lines: Page) -> str:
    """The first line in which ranks differ, in words."""
    for line in lines.lines:
        history = line.histories[0] or ()
        if len(set(history)) > 1:
            common = history[0]
            other = next(cell for cell in history if cell != common)
            here, usual = other or tr("not there"), common or tr("nothing")
            return tr("{tensors}: {here} where most have {usual}.", tensors=line.label, here=here, usual=usual)
    return ""


def _text(title: str, sentence: str, around: str, columns: Sequence[Column], lines: Page, found: Divergence) -> str:
    """The text twin: a column per rank or group."""
    heads = ["", "", *(column.name if _folded(columns) else tr("rank {rank}", rank=column.name) for column in columns)]
    rows = [
        [
            line.label,
            line.remark,
            *("-" if c.group < 0 else str(h or "-") for c, h in zip(columns, line.histories[0] or (), strict=True)),
        ]
        for line in lines.lines
    ]
    if not _folded(columns):
        rows.append(["", "", *(column.below for column in columns)])
    out = [title, *([sentence] if sentence else []), around, "", *table([heads, *rows])]
    out += [
        tr("{group}: ranks {ranks}", group=column.name.partition(":")[0], ranks=column.below)
        for column in columns
        if _folded(columns)
    ]
    for rank, why in list(found.ended.items())[:8]:
        out.append(f"{tr('rank {rank}', rank=rank)}: {why}")
    if found.missing:
        out.append(f"{tr('missing')}: {spans_text(found.missing)}")
    return "\n".join([*out, *_remarks(columns, lines, found)])


def _folded(columns: Sequence[Column]) -> bool:
    return any(":" in column.name for column in columns)


def _remarks(columns: Sequence[Column], lines: Page, found: Divergence) -> list[str]:
    remarks = []
    further = found.groups[SIDE_BY_SIDE:] if _folded(columns) else ()
    if further:
        ranks = sum(len(group.ranks) for group in further)
        text = msg("{count} ranks are in {states} further states.")
        remarks.append(tr(text, count=f"{ranks:,}", states=f"{len(further):,}"))
    if lines.left_out:
        text = msg("{count} tensors differ in further ways; rows= shows more.")
        remarks.append(tr(text, count=f"{lines.left_out:,}"))
    return remarks


# ---- how it is drawn


def _draw(
    scene: Scene,
    columns: Sequence[Column],
    lines: Page,
    found: Divergence,
    sentence: str,
    around: str,
    world: int,
) -> None:
    label = min(max(text_width(line.label, LABEL) for line in lines.lines), 330.0)
    remark = max(text_width(line.remark, 10.5) for line in lines.lines)
    left = MARGIN + label + 12 + remark + (14 if remark else 4)
    pitch = min(max((scene.width - left - MARGIN + GAP) / len(columns), 56.0), 130.0)
    scene.width = max(scene.width, left + pitch * len(columns) - GAP + MARGIN)
    y = head(scene, scene.title, around, sentence)
    folded = world > SIDE_BY_SIDE
    scene.add(Text(left - 12, y + 4, tr("ranks") if folded else tr("rank"), 10.5, palette.MUTED, anchor="end"))
    for c, column in enumerate(columns):
        ink = palette.BAD if column.bad else palette.INK
        scene.add(Text(left + pitch * c + (pitch - GAP) / 2, y + 4, column.name, 12, ink, True, "middle"))
    top = y = y + 14
    for line in lines.lines:
        scene.add(Text(MARGIN + label, y + 16, shorten(line.label, label, LABEL), LABEL, anchor="end", tip=line.label))
        if line.remark:
            scene.add(Text(MARGIN + label + 12 + remark, y + 16, line.remark, 10.5, palette.MUTED, anchor="end"))
        history = line.histories[0] or ()
        usual = next((cell for column, cell in zip(columns, history, strict=True) if column.group == 0), None)
        before: object = object()
        for c, (column, cell) in enumerate(zip(columns, history, strict=True)):
            if column.group >= 0:
                x = left + pitch * c
                where = tr("rank {rank}", rank=column.name)
                look = cells.Look(cell != before, tip=f"{line.label}, {where}: {cell or tr('not there')}")
                cells.draw(scene, x, y, pitch - GAP, 24, cell, look)
                if cell != usual:
                    scene.add(Rect(x - 2.5, y - 2.5, pitch - GAP + 5, 29, None, 5, palette.INK, 1.8))
                before = cell
        y += 31
    for c, column in enumerate(columns):
        x = left + pitch * c
        if column.group < 0:
            _gone(scene, x, top, pitch - GAP, y - 7 - top, column.bad)
    y = _below(scene, columns, left, pitch, y)
    if folded and world <= TILES:
        y = _mosaic(scene, found, world, y + 22)
    shown = [
        cell
        for cell in found.cells
        if cell is not None and any(cell in (line.histories[0] or ()) for line in lines.lines)
    ]
    y = cells.legend(scene, MARGIN, y + 18, shown, True, False)
    for told in _remarks(columns, lines, found):
        scene.add(Text(MARGIN, y + 14, shorten(told, scene.width - 2 * MARGIN, 11), 11, palette.MUTED))
        y += 16
    scene.height = y + 14


def _gone(scene: Scene, x: float, y: float, width: float, height: float, bad: bool) -> None:
    """The place of a rank that left no trace."""
    colour = palette.BAD if bad else palette.MUTED
    scene.add(Rect(x, y, width, height, palette.GROUND, 4, colour, 1.0, tr("no trace of this rank")))
    hatch.diagonal(scene, x, y, width, height, palette.BAD_SOFT if bad else palette.FAINT)


def _below(scene: Scene, columns: Sequence[Column], left: float, pitch: float, y: float) -> float:
    """What is to be said of each column."""
    lowest = y
    for c, column in enumerate(columns):
        at = y - 2
        for part in wrap(column.below, pitch - 6, 10.5, 3, breaks=" ,.") if column.below else []:
            at += 13
            ink = palette.BAD if column.bad else palette.INK
            scene.add(
                Text(left + pitch * c + (pitch - GAP) / 2, at, part, 10.5, ink, anchor="middle", tip=column.below)
            )
        lowest = max(lowest, at)
    return lowest + 4


def _mosaic(scene: Scene, found: Divergence, world: int, y: float) -> float:
    """Every rank as a tile: plain where it is as most are, with its group's letter where it is not."""
    for part in wrap(tr(_KEY), scene.width - 2 * MARGIN, 11.5, 3):
        scene.add(Text(MARGIN, y, part, 11.5, palette.MUTED))
        y += 15
    left = MARGIN + text_width(f"{world:,}", 10) + 10
    fitting = (scene.width - left - MARGIN) / TILE
    across = next(n for n in (64, 32, 16, 8) if n <= fitting or n == 8)
    group_of = {rank: g for g, group in enumerate(found.groups) for rank in group.ranks}
    rows = (world - 1) // across + 1
    scene.add(Rect(left, y, TILE * across, TILE * rows, palette.FAINT, 0, tip=tr("ranks of group A")))
    for i in range(1, across):
        scene.add(Line(left + TILE * i - 1, y, left + TILE * i - 1, y + TILE * rows, palette.GROUND, 2))
    for row in range(rows):
        scene.add(Line(left, y + TILE * row - 1, left + TILE * across, y + TILE * row - 1, palette.GROUND, 2))
        scene.add(Text(left - 8, y + TILE * row + 10, f"{row * across:,}", 10, palette.MUTED, anchor="end"))
    last = left + TILE * (world - across * (rows - 1))
    scene.add(Rect(last, y + TILE * (rows - 1), left + TILE * across - last, TILE, palette.GROUND, 0))
    for rank in range(world):
        if group_of.get(rank, -1) or rank in found.ended:
            _tile(
                scene, left + TILE * (rank % across), y + TILE * (rank // across), rank, group_of.get(rank, -1), found
            )
    return y + TILE * rows


def _tile(scene: Scene, x: float, y: float, rank: int, group: int, found: Divergence) -> None:
    """A tile that is not as most are."""
    side = TILE - 2
    ended = found.ended.get(rank, "")
    if group < 0:
        colour, why = (palette.BAD, tr("missing")) if rank in found.missing else (palette.MUTED, tr("not recorded"))
        scene.add(Rect(x, y, side, side, palette.GROUND, 2, colour, 1.0, f"{tr('rank {rank}', rank=rank)}: {why}"))
        scene.add(Line(x + 2, y + side - 2, x + side - 2, y + 2, colour))
        return
    letter = LETTERS[group] if group < SIDE_BY_SIDE else "…"
    tip = tr("rank {rank}: group {letter}", rank=rank, letter=letter) + (f", {ended}" if ended else "")
    fill = palette.INK if group else palette.FAINT
    scene.add(Rect(x, y, side, side, fill, 2, palette.BAD if ended else None, 1.6 if ended else 0.0, tip))
    if group:
        scene.add(Text(x + side / 2, y + 8.6, letter, 8.5, palette.GROUND, True, "middle"))
