"""The lifeline: one tensor's way over the devices, moment by moment: what its metadata says, where its bytes are, when
it is gathered whole, where its gradient is.

The rules: a device is a lane; metadata is a line and bytes are a bar, so that a split is seen as the two in different
lanes; the call that moved something stands under the moment.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence

from diagkit.errors import UsageError
from diagkit.language import msg, tr
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import ABSENT, BUFFER, CALL, GRADIENT, PARAMETER, Residency, Row
from diagkit.views import palette, words
from diagkit.views.chosen import Source, one_rank, opened
from diagkit.views.figure import ViewFigure
from diagkit.views.holdings import with_index
from diagkit.views.lanes import NOWHERE, TRACKS, Glimpse, draw_lanes, lane_note, lanes_of
from diagkit.views.lines import Page
from diagkit.views.panels import GAP, MARGIN, Panel, head, moments_below, notes_below, tone
from diagkit.views.scene import Polygon, Scene, Text, clean, shorten, text_width
from diagkit.views.sizes import local_bytes, whole_bytes
from diagkit.views.story import Column, Story, cell_of, choose
from diagkit.views.timeline import Timeline
from diagkit.views.verdict import Verdict, context, judge

__all__ = ["find", "lifeline", "lifeline_scene"]


def lifeline(
    trace: Source,
    name: str,
    rank: int | None = None,
    start: int | str | None = None,
    end: int | str | None = None,
    *,
    moments: int = 10,
    title: str | None = None,
    width: int = 1000,
) -> ViewFigure:
    """One parameter's or buffer's way over the devices.

    Args:
        trace: a trace, one rank of it, the path of one, or what `inspect` returned. One that was recorded with
            ``detail="full"`` shows also when the parameter is gathered and when its gradient arrives.
        name: its name, or a part that no other name holds.
        rank: whose; unless given, the lowest of those that met the first failure, else the lowest.
        start, end: the first and the last moment, by index, or by the name of the phase that begins or ends there.
        moments: at most so many.
        title: in place of the sentence that the figure finds by itself.
        width: in pixels at 100 dpi; more where the moments need it.

    Raises:
        UsageError: no trace, no such tensor, moment or phase, or nothing between start and end.
        TraceError: nothing at that path is a trace.
    """
    return ViewFigure(lifeline_scene(one_rank(opened(trace), rank), name, start, end, moments, title, width))


def lifeline_scene(
    one: RankTrace,
    name: str,
    start: int | str | None = None,
    end: int | str | None = None,
    moments: int = 10,
    title: str | None = None,
    width: float = 1000,
    at: int | None = None,
) -> Scene:
    """The same as shapes, for who wants no more than an SVG; ``at`` marks the moment of that index, or the last shown
    before it.
    """
    row = find(one, name)
    glimpses = _glimpses(one, row)
    first, last = _span(one, start, end)
    if not any(glimpse is not NOWHERE for glimpse in glimpses[first : last + 1]):
        raise UsageError("the tensor is not there in these moments", found=name, where=one.path)
    story = _story(one, row, glimpses, range(first, last + 1), moments)
    shown = [glimpses[column.moment.index] for column in story.columns]
    verdict = judge(story)
    gathered = _gathered([glimpses[column.moment.index] for column in story.every])
    before = [c for c, column in enumerate(story.columns) if at is not None and column.moment.index <= at]
    return _draw(story, verdict, shown, title or verdict.title + gathered, width, before[-1] if before else None)


def find(rank: RankTrace, name: str) -> Row:
    """The parameter or buffer of this name, or the only one whose name holds the text.

    Raises:
        UsageError: none, or more than one.
    """
    rows = [row for row in rank.rows if row.kind in (PARAMETER, BUFFER)]
    exact = [row for row in rows if row.name == name]
    if exact:
        return exact[0]
    holding = [row for row in rows if name and name in row.name]
    if len(holding) == 1:
        return holding[0]
    near = [row.name for row in holding] or difflib.get_close_matches(name, [row.name for row in rows[:5000]], 3, 0.5)
    raise UsageError(
        "several tensors have this in their names" if holding else "no such parameter or buffer",
        found=name,
        expected=f"one of {', '.join(near[:3])}{', ...' if len(near) > 3 else ''}" if near else None,
    )


def _span(rank: RankTrace, start: int | str | None, end: int | str | None) -> tuple[int, int]:
    count = len(rank.moments)
    if count == 0:
        raise UsageError("nothing to show", found="a trace without moments", where=rank.path)
    first = _moment(rank, start, first=True) if start is not None else 0
    last = _moment(rank, end, first=False) if end is not None else count - 1
    if last < first:
        raise UsageError("the end lies before the start", found=f"moments {first} to {last}")
    return first, last


def _moment(rank: RankTrace, at: int | str, first: bool) -> int:
    count = len(rank.moments)
    if isinstance(at, int):
        if not -count <= at < count:
            raise UsageError("no such moment in this trace", found=at, expected=f"0 to {count - 1}")
        return at % count
    inside = [m.index for m in rank.moments if rank.phases.get(m.phase, rank.phases[0]).name == at]
    if not inside:
        names = ", ".join(dict.fromkeys(p.name for p in rank.phases.values() if p.name))
        raise UsageError("no such phase in this trace", found=at, expected=f"one of {names}" if names else None)
    return inside[0] if first else inside[-1]


def _glimpses(rank: RankTrace, row: Row) -> list[Glimpse]:
    """The tensor right after every moment of the trace."""
    timeline = Timeline.of_rank(rank)
    gradient = next((r for r in rank.rows if r.kind == GRADIENT and (r.model, r.name) == (row.model, row.name)), None)
    own = timeline.of(row.id)
    its = timeline.of(gradient.id) if gradient else [ABSENT] * len(own)
    seen = {
        pair: _glimpse(rank, row, gradient, *(rank.facts[n] for n in pair)) for pair in set(zip(own, its, strict=True))
    }
    return [seen[pair] for pair in zip(own, its, strict=True)]


def _glimpse(rank: RankTrace, row: Row, gradient: Row | None, facts: object, its: object) -> Glimpse:
    if not isinstance(facts, Residency):
        return NOWHERE
    places: list[str | None] = [facts.metadata_device, facts.storage_device or "?", None, None]
    sizes: list[int | None] = [None, local_bytes(rank, row, facts), None, None]
    if facts.sharded_state == "unsharded":
        places[2] = with_index(rank, facts.mesh_device or rank.header.device)
        sizes[2] = whole_bytes(row, facts)
    if gradient is not None and isinstance(its, Residency):
        places[3], sizes[3] = its.storage_device or its.metadata_device, local_bytes(rank, gradient, its)
    return Glimpse(tuple(places), tuple(sizes), bool(facts.pinned), facts.split)  # type: ignore[arg-type]


def _story(rank: RankTrace, row: Row, glimpses: Sequence[Glimpse], span: range, moments: int) -> Story:
    """The tensor's own story: moments matter when a glimpse changes."""
    facts = Timeline.of_rank(rank).of(row.id)
    cells = {number: cell_of(f) if isinstance(f := rank.facts[number], Residency) else None for number in set(facts)}
    order = [None, *dict.fromkeys(cell for cell in cells.values() if cell is not None)]
    every = tuple(
        Column(
            rank.moments[i],
            rank.phases.get(rank.moments[i].phase, rank.phases[0]),
            changed=i > span.start and glimpses[i] != glimpses[i - 1] and glimpses[i - 1] is not NOWHERE,
            splits=int(glimpses[i].split),
            present=int(glimpses[i] is not NOWHERE),
        )
        for i in span
    )
    # A call that left this tensor alone says nothing of it.
    telling = [i for i, c in enumerate(every) if i == 0 or c.changed or c.failed or c.moment.kind != CALL]
    kept = [telling[i] for i in choose([every[i] for i in telling], moments, rank)]
    history = tuple(order.index(cells[facts[every[i].moment.index]]) for i in kept)
    label = clean(row.name) or tr("(no name)")
    columns = tuple(every[i] for i in kept)
    tensor = (row.kind, row.model, row.name, row.part)
    return Story(rank, every, columns, (tensor,), tuple(order), (history,), subject=label)


def _gathered(glimpses: Sequence[Glimpse]) -> str:
    """``"; gathered on npu:0 twice"``."""
    places = [place for place, _ in itertools.groupby(glimpse.places[2] for glimpse in glimpses) if place]
    if not places:
        return ""
    text = {1: msg("; gathered on {device} once"), 2: msg("; gathered on {device} twice")}
    return tr(text.get(len(places), msg("; gathered on {device} {count} times")), device=places[0], count=len(places))


def _draw(
    story: Story, verdict: Verdict, shown: Sequence[Glimpse], title: str, width: float, marked: int | None
) -> Scene:
    lanes = lanes_of(shown)
    named = max(text_width(lane, 13, True) for lane in lanes)
    noted = max(text_width(lane_note(story.rank, lane), 10.5) for lane in lanes)
    tracked = max(text_width(tr(track), 10.5) for track in TRACKS)
    left = MARGIN + max(named, noted) + 18 + tracked + 12
    pitch = min(max((width - left - MARGIN + GAP) / len(shown), 64.0), 150.0)
    panel = Panel(story, verdict, "", "", left, pitch)
    width = max(width, left + panel.width + MARGIN)
    scene = Scene(width, 0, title, _text(story, verdict, shown, title))
    y = head(scene, title, context(story), verdict.sentence, tone(verdict))
    bottom = draw_lanes(scene, panel, lanes, shown, y)
    if marked is not None:
        middle = left + pitch * marked + panel.cell / 2
        scene.add(Polygon(((middle, bottom + 1), (middle + 5, bottom + 8), (middle - 5, bottom + 8)), palette.INK))
    y = notes_below(scene, [panel], moments_below(scene, [panel], bottom + 4))
    if remark := words.left_out([(story, verdict, "")], Page((), 0)):
        scene.add(Text(MARGIN, y + 14, shorten(remark, width - 2 * MARGIN, 11), 11, palette.MUTED))
        y += 16
    scene.height = y + 14
    return scene


def _text(story: Story, verdict: Verdict, shown: Sequence[Glimpse], title: str) -> str:
    """The text twin: a line per track, a column per moment."""
    marks = words.notes(story, verdict)
    number = {note.column: f" [{note.number}]" for note in marks}
    heads = ["", *(words.moment_name(column) + number.get(c, "") for c, column in enumerate(story.columns))]
    rows = [
        [tr(name), *(glimpse.words(track) for glimpse in shown)]
        for track, name in enumerate(TRACKS)
        if any(glimpse.places[track] for glimpse in shown)
    ]
    rows.append(["", *("SPLIT" if glimpse.split else "" for glimpse in shown)])
    out = [title, verdict.sentence, context(story), "", *words.table([heads, *rows])]
    out += [f"[{note.number}] {note.text}" for note in marks]
    if remark := words.left_out([(story, verdict, "")], Page((), 0)):
        out += ["", remark]
    return "\n".join(out)
