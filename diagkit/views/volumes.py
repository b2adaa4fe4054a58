"""Bytes by device: how much a rank holds on its accelerator and in host memory, pinned and pageable apart, over time.

The rules: all bars have one scale, so that heights compare; what the bytes are for is a hatch, not a colour; a line
marks what the accelerator has, where that is near enough to matter, and words say it where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diagkit.errors import UsageError
from diagkit.language import msg, tr, trn
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import device_type
from diagkit.views import hatch, palette, words
from diagkit.views.chosen import Source, one_rank, opened
from diagkit.views.figure import ViewFigure
from diagkit.views.holdings import PAGEABLE, PARTS, PINNED, Holding, holdings, with_index
from diagkit.views.panels import GAP, MARGIN, Panel, head, moments_below, notes_below
from diagkit.views.scene import Line, Rect, Scene, Text, text_width, wrap
from diagkit.views.sizes import human
from diagkit.views.story import Column, Story, choose
from diagkit.views.verdict import Verdict, context

__all__ = ["bytes_by_device"]

LANE = 92.0  # height of the tallest bar
SCOPE = msg("Counted: watched tensors on this rank, each storage once; not activations, caches or padding.")
_HATCHES: dict[str, Callable[[Scene, float, float, float, float, str], None]] = {
    "optimizer state": hatch.horizontal,
    "gradients": hatch.vertical,
    "gathered copies": hatch.diagonal,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn: the shown moments' holdings, place by place. ``capacity`` in bytes by place, where known."""

    story: Story
    held: tuple[Holding, ...]
    places: tuple[str, ...]
    peaks: dict[str, int]  # place -> index of the moment at which it held most
    every: Sequence[Holding]
    capacity: dict[str, int]

    def peak(self, place: str) -> int:
        return self.every[self.peaks[place]].total(place)


def bytes_by_device(
    trace: Source, rank: int | None = None, *, moments: int = 10, title: str | None = None, width: int = 1000
) -> ViewFigure:
    """How many bytes one rank holds on each device, moment by moment, and what for.

    Sizes come from the local shapes and dtypes in the trace. A gathered parameter counts with its whole size in its own
    dtype while it is unsharded, which a trace of ``detail="full"`` shows.

    Args:
        trace: a trace, one rank of it, the path of one, or what `inspect` returned.
        rank: whose; unless given, the lowest of those that met the first failure, else the lowest.
        moments: at most so many; the peak of every device is always among them.
        title: in place of the sentence that the figure finds by itself.
        width: in pixels at 100 dpi; more where the moments need it.

    Raises:
        UsageError: no trace, or nothing in it has a size.
        TraceError: nothing at that path is a trace.
    """
    one = one_rank(opened(trace), rank)
    chart = _chart(one, moments)
    found, sentence = _answer(chart)
    return _draw(chart, title or found, sentence, width)


def _chart(rank: RankTrace, moments: int) -> Chart:
    every = holdings(rank)
    accelerators = {place for held in every for place, _ in held.bytes_of if device_type(place) != "cpu"}
    places = [*sorted(accelerators - {PINNED, PAGEABLE}), PINNED, PAGEABLE]
    peaks = {place: max(range(len(every)), key=lambda i: every[i].total(place)) for place in places if every}
    used = tuple(place for place in places if every and every[peaks[place]].total(place))
    if not used:
        raise UsageError(
            "nothing to count",
            found=f"{len(every)} moments, no tensor of a known size",
            where=rank.path,
            remedy="Record with this version of diagkit: older traces lack local shapes",
        )
    columns = tuple(
        Column(
            moment,
            rank.phases.get(moment.phase, rank.phases[0]),
            changed=i > 0 and every[i].bytes_of != every[i - 1].bytes_of,
            splits=0,
            present=1,
        )
        for i, moment in enumerate(rank.moments)
    )
    telling = [i for i, c in enumerate(columns) if i == 0 or c.changed or c.failed or i == len(columns) - 1]
    kept = {telling[i] for i in choose([columns[i] for i in telling], moments, rank)}
    kept |= {peaks[place] for place in used}
    story = Story(rank, columns, tuple(columns[i] for i in sorted(kept)), (), (None,), ())
    own = with_index(rank, rank.header.device)
    capacity = {own: rank.header.device_memory << 20} if rank.header.device_memory else {}
    return Chart(story, tuple(every[i] for i in sorted(kept)), used, peaks, every, capacity)


def _answer(chart: Chart) -> tuple[str, str]:
    """Title and sentence: the peaks, and what most of the greatest one is."""
    told = []
    for place in chart.places:
        text = {
            PINNED: msg("{size} in pinned host memory"),
            PAGEABLE: msg("{size} in pageable host memory"),
        }.get(place, msg("{size} on {place}"))
        told.append(tr(text, size=human(chart.peak(place)), place=place))
    listed = told[0] if len(told) == 1 else tr(" and ").join((", ".join(told[:-1]), told[-1]))
    title = tr("At most {what}", what=listed)
    first = chart.places[0]
    moment = chart.peaks[first]
    parts = {part: count for (place, part), count in chart.every[moment].bytes_of.items() if place == first}
    most = max(parts, key=lambda part: parts[part])
    all_of_it = msg("{place} holds most at “{moment}”: all of it {part}.")
    text = all_of_it if len(parts) == 1 else msg("{place} holds most at “{moment}”: {size} of it {part}.")
    name = words.moment_name(chart.story.every[moment])
    sentence = tr(text, place=tr(first), moment=name, size=human(parts[most]), part=tr(most))
    if unsized := chart.every[moment].unsized:
        sentence += " " + trn(
            "{count} tensor of unknown size not counted.", "{count} tensors of unknown size not counted.", unsized
        )
    return title, sentence


def _draw(chart: Chart, title: str, sentence: str, width: float) -> ViewFigure:
    notes = [_lane_note(chart, place) for place in chart.places]
    labels = max(
        *(text_width(tr(place), 13, True) for place in chart.places),
        *(text_width(line, 10.5) for n in notes for line in n),
    )
    left = MARGIN + labels + 20
    pitch = min(max((width - left - MARGIN + GAP) / len(chart.held), 64.0), 150.0)
    verdict = Verdict(title, sentence, "", good=True)
    panel = Panel(chart.story, verdict, "", "", left, pitch)
    width = max(width, left + panel.width + MARGIN)
    scene = Scene(width, 0, title, _text(chart, verdict))
    y = head(scene, title, context(chart.story), sentence)
    scale = _scale(chart)
    for place, note in zip(chart.places, notes, strict=True):
        y = _lane(scene, panel, chart, place, note, scale, y)
    y = notes_below(scene, [panel], moments_below(scene, [panel], y))
    y = _legend(scene, chart, y + 14)
    for line in wrap(" ".join(_remarks(chart)), width - 2 * MARGIN, 11, 2):
        scene.add(Text(MARGIN, y + 14, line, 11, palette.MUTED))
        y += 16
    scene.height = y + 14
    return ViewFigure(scene)


def _scale(chart: Chart) -> float:
    """Bytes per pixel."""
    peaks = [chart.peak(place) for place in chart.places]
    near = [size for place, size in chart.capacity.items() if place in chart.places and chart.peak(place) * 4 >= size]
    return max(*peaks, *near, 1) / LANE


def _lane(scene: Scene, panel: Panel, chart: Chart, place: str, note: Sequence[str], scale: float, y: float) -> float:
    """One place's bars. Returns the lower edge."""
    top = y + 18  # room for the numbers above the bars
    capacity = chart.capacity.get(place, 0)
    drawn = bool(capacity) and capacity / scale <= LANE * 1.001
    height = max(chart.peak(place) / scale, capacity / scale if drawn else 0.0, 34.0)
    bottom = top + height
    scene.add(Text(MARGIN, top + 4, tr(place), 13, bold=True))
    for i, line in enumerate(note):
        scene.add(Text(MARGIN, top + 20 + 14 * i, line, 10.5, palette.MUTED))
    if drawn:
        at = bottom - capacity / scale
        scene.add(Line(panel.left, at, panel.left + panel.width, at, palette.BAD, 1.4))
    before = -1
    for c, held in enumerate(chart.held):
        total = held.total(place)
        x = panel.left + panel.pitch * c
        _bar(scene, x, bottom, panel.cell, held, place, scale, words.moment_name(panel.story.columns[c]))
        if total != before:
            text = human(total)
            scene.add(Text(x + panel.cell / 2, bottom - total / scale - 5, text, 10.5, anchor="middle"))
        before = total
    scene.add(Line(panel.left, bottom, panel.left + panel.width, bottom, palette.MUTED))
    return max(bottom, top + 6 + 14 * (len(note) + 1)) + 8


def _bar(
    scene: Scene, x: float, bottom: float, width: float, held: Holding, place: str, scale: float, moment: str
) -> None:
    colours = palette.device(place.partition(",")[0])
    y = bottom
    for part in PARTS:
        size = held.bytes_of.get((place, part), 0)
        if not size:
            continue
        height = max(size / scale, 1.0)
        y -= height
        _patch(scene, x, y, width, height, part, colours, _tip(moment, size, part, place))
        scene.add(Line(x, y, x + width, y, palette.GROUND))


def _patch(
    scene: Scene, x: float, y: float, width: float, height: float, part: str, colours: palette.Device, tip: str
) -> None:
    """An area of one part's look: gathered copies are hollow, for they are not the parameter's own."""
    hollow = part == "gathered copies"
    scene.add(Rect(x, y, width, height, palette.GROUND if hollow else colours.fill, 0, tip=tip))
    if part in _HATCHES:
        _HATCHES[part](scene, x, y, width, height, colours.fill if hollow else palette.GROUND)
    if part in ("buffers", "exported tensors"):
        edge = palette.INK if part == "buffers" else palette.MUTED
        scene.add(Rect(x + 0.6, y, width - 1.2, height, None, 0, edge, 1.2))


def _tip(moment: str, size: int, part: str, place: str) -> str:
    text = msg("{moment}: {size} of {part} on {place}")
    return tr(text, moment=moment, size=human(size), part=tr(part), place=tr(place))


def _lane_note(chart: Chart, place: str) -> list[str]:
    lines = [tr("peak {size}", size=human(chart.peak(place)))]
    if capacity := chart.capacity.get(place):
        text = msg("of {size} (simulated)") if chart.story.rank.header.simulated else msg("of {size}")
        lines.append(tr(text, size=human(capacity)))
    return lines


def _legend(scene: Scene, chart: Chart, y: float) -> float:
    """What the hatches mean, those that are there."""
    there = {part for held in chart.held for (place, part) in held.bytes_of if place in chart.places}
    x = MARGIN
    for part in (part for part in PARTS if part in there):
        _patch(scene, x, y, 24, 14, part, palette.CPU, tr(part))
        scene.add(Rect(x, y, 24, 14, None, 0, palette.CPU.fill, 1.0), Text(x + 31, y + 11, tr(part), 11.5))
        x += 31 + text_width(tr(part), 11.5) + 18
        if x > scene.width - 150:
            x, y = MARGIN, y + 22
    return y + (22 if x > MARGIN else 0)


def _remarks(chart: Chart) -> list[str]:
    story = chart.story
    text = msg("Shown: {shown} of {count} moments.")
    shown = [tr(text, shown=len(story.columns), count=len(story.every))] if story.left_out else []
    return [tr(SCOPE), *shown]


def _text(chart: Chart, verdict: Verdict) -> str:
    """The text twin: a line per place and part, a column per moment."""
    marks = words.notes(chart.story, verdict)
    number = {note.column: f" [{note.number}]" for note in marks}
    heads = ["", "", *(words.moment_name(c) + number.get(i, "") for i, c in enumerate(chart.story.columns))]
    rows = []
    for place in chart.places:
        size = chart.capacity.get(place)
        capacity = f" ({tr('of {size}', size=human(size))})" if size is not None else ""
        rows.append([tr(place) + capacity, tr("all"), *(human(held.total(place)) for held in chart.held)])
        for part in PARTS:
            sizes = [held.bytes_of.get((place, part), 0) for held in chart.held]
            if any(sizes):
                rows.append(["", tr(part), *(human(size) if size else "-" for size in sizes)])
    out = [verdict.title, verdict.sentence, context(chart.story), "", *words.table([heads, *rows])]
    out += [f"[{note.number}] {note.text}" for note in marks]
    return "\n".join([*out, "", *_remarks(chart)])
