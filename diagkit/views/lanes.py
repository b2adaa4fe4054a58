"""A tensor's way drawn over lanes, a lane per device: a line for its metadata, bars for bytes, gathered copy and
gradient.

The rules: each of the four has a shape of its own (a line with a ring, a bar, a hatched bar, a slim bar with a
diamond), so that no colour carries a meaning alone; a lane holds only what was ever there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diagkit.language import msg, tr
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import device_type
from diagkit.views import hatch, palette, words
from diagkit.views.panels import GAP, MARGIN, Panel
from diagkit.views.scene import Dot, Line, Polygon, Rect, Scene, Text, text_width
from diagkit.views.sizes import human

__all__ = ["NOWHERE", "TRACKS", "Glimpse", "draw_lanes", "lane_note", "lanes_of"]

State = TypeVar("State")

TRACK = 22.0
#: What a lane may hold, from top to bottom.
TRACKS = (msg("metadata"), msg("bytes"), msg("gathered"), msg("gradient"))
BYTES = 1  # the place of the bytes among the tracks
LANE_NOTES = {"cpu": msg("host memory"), "meta": msg("no bytes")}


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The tensor at one moment: on which device each of `TRACKS` is (None: nowhere), and how many bytes that is."""

    places: tuple[str | None, str | None, str | None, str | None]
    sizes: tuple[int | None, int | None, int | None, int | None]
    pinned: bool = False
    split: bool = False

    def words(self, track: int) -> str:
        """``"cpu, pinned, 64 kB"``."""
        place, size = self.places[track], self.sizes[track]
        if place is None:
            return "-"
        pinned = [tr("pinned")] if track == BYTES and self.pinned else []
        return ", ".join([place, *pinned, *([human(size)] if size else [])])


NOWHERE = Glimpse((None, None, None, None), (None, None, None, None))


def lanes_of(shown: Sequence[Glimpse]) -> dict[str, list[int]]:
    """The devices, accelerators first, and the tracks that each of them needs."""
    found: dict[str, set[int]] = {}
    for glimpse in shown:
        for track, place in enumerate(glimpse.places):
            if place is not None:
                found.setdefault(place, set()).add(track)
    order = {"cpu": 1, "meta": 3, "?": 2}
    names = sorted(found, key=lambda name: (order.get(device_type(name) or "", 0), name))
    return {name: sorted(found[name]) for name in names}


def lane_note(rank: RankTrace, lane: str) -> str:
    if lane == "?":
        return tr("could not be read")
    accelerator = msg("simulated accelerator") if rank.header.simulated else msg("accelerator")
    return tr(LANE_NOTES.get(device_type(lane) or "", accelerator))


def draw_lanes(scene: Scene, panel: Panel, lanes: dict[str, list[int]], shown: Sequence[Glimpse], y: float) -> float:
    """All lanes with what is in them. Returns the lower edge."""
    y += 16 if any(glimpse.split for glimpse in shown) else 0
    top, middles = y, {}
    for lane, tracks in lanes.items():
        y += 6
        for track in tracks if len(tracks) > 1 else (*tracks, None):
            if track is not None:
                middles[lane, track] = y + (TRACK if len(tracks) == 1 else TRACK / 2)
            y += TRACK
        y += 6
    _splits(scene, panel, shown, top, y)
    for lane, tracks in lanes.items():
        upper = min(middles[lane, track] for track in tracks) - (TRACK if len(tracks) == 1 else TRACK / 2)
        if upper - 6 > top:
            scene.add(Line(MARGIN, upper - 6, panel.left + panel.width, upper - 6, palette.FAINT))
        scene.add(Text(MARGIN, upper + 15, lane, 13, bold=True))
        scene.add(Text(MARGIN, upper + 31, lane_note(panel.story.rank, lane), 10.5, palette.MUTED))
        for track in tracks:
            scene.add(
                Text(panel.left - 12, middles[lane, track] + 4, tr(TRACKS[track]), 10.5, palette.MUTED, anchor="end")
            )
    for track in range(len(TRACKS)):
        _way(scene, panel, shown, track, middles)
    return y


def _splits(scene: Scene, panel: Panel, shown: Sequence[Glimpse], top: float, bottom: float) -> None:
    """The ground under the moments at which metadata and bytes are apart."""
    passing = words.passing(panel.story)
    marks = [0 if not glimpse.split else 1 if c in passing else 2 for c, glimpse in enumerate(shown)]
    for mark, x, width in _runs(panel, marks):
        if mark:
            label = tr("split") if mark == 2 else tr("in passing")
            fill, ink = (palette.BAD_SOFT, palette.BAD) if mark == 2 else (palette.FAINT, palette.MUTED)
            scene.add(Rect(x - 4, top, width + 8, bottom - top, fill, 4, tip=tr("metadata and bytes are apart")))
            scene.add(Text(x + width / 2, top - 5, label, 10.5, ink, mark == 2, "middle"))


def _way(
    scene: Scene, panel: Panel, shown: Sequence[Glimpse], track: int, middles: dict[tuple[str, int], float]
) -> None:
    """One track's bars over the moments, joined where it changes its lane."""
    draw = (_metadata, _bytes, _whole, _slim)[track]
    before: tuple[float, float] | None = None
    states = [(glimpse.places[track], glimpse.sizes[track], track == BYTES and glimpse.pinned) for glimpse in shown]
    at = 0
    for state, x, width in _runs(panel, states):
        place, size, pinned = state
        columns = round((width + GAP) / panel.pitch)
        if place is None:
            before = None
        else:
            y = middles[place, track]
            if before is not None and before[1] != y:
                colour = palette.INK if track == 0 else palette.MUTED
                scene.add(Line(x - GAP / 2, before[1], x - GAP / 2, y, colour, 1.4))
                scene.add(Line(before[0], before[1], x - GAP / 2, before[1], colour, 1.4))
                scene.add(Line(x - GAP / 2, y, x, y, colour, 1.4))
            first, last = panel.story.columns[at], panel.story.columns[at + columns - 1]
            until = tr(" to {moment}", moment=words.moment_name(last)) if columns > 1 else ""
            tip = f"{words.moment_name(first)}{until}: {tr(TRACKS[track])} {shown[at].words(track)}"
            draw(scene, x, y, width, place, _label(size, bool(pinned), width), tip)
            if pinned:
                scene.add(Dot(x + width - 8, y, 2.2, palette.device(place).ink))
            before = (x + width, y)
        at += columns


def _label(size: int | None, pinned: bool, room: float) -> str:
    """As much as fits of ``"64 kB, pinned"``."""
    text = human(size) if size is not None else ""
    longer = ", ".join(filter(None, (text, tr("pinned")))) if pinned else text
    return next((word for word in (longer, text) if text_width(word, 10) <= room - 28), "")


def _metadata(scene: Scene, x: float, y: float, width: float, place: str, label: str, tip: str) -> None:
    scene.add(Rect(x, y - 1.2, width, 2.4, palette.INK, 1, tip=tip), Dot(x + 4, y, 4.5, palette.INK))
    scene.add(Dot(x + 4, y, 2.6, palette.GROUND))


def _bytes(scene: Scene, x: float, y: float, width: float, place: str, label: str, tip: str) -> None:
    colours = palette.device(place)
    scene.add(Rect(x, y - 8, width, 16, colours.fill, 4, tip=tip))
    if label:
        scene.add(Text(x + 7, y + 3.6, label, 10, colours.ink))


def _whole(scene: Scene, x: float, y: float, width: float, place: str, label: str, tip: str) -> None:
    colour = palette.device(place).fill
    scene.add(Rect(x, y - 8, width, 16, palette.GROUND, 4, colour, 1.4, tip))
    hatch.diagonal(scene, x + 1, y - 7, width - 2, 14, colour)
    if label:
        room = text_width(label, 10) + 8
        scene.add(Rect(x + 5, y - 6.5, room, 13, palette.GROUND, 3), Text(x + 9, y + 3.6, label, 10))


def _slim(scene: Scene, x: float, y: float, width: float, place: str, label: str, tip: str) -> None:
    colours = palette.device(place)
    scene.add(Rect(x, y - 6, width, 12, colours.fill, 3, palette.INK, 1.0, tip))
    scene.add(Polygon(((x + 7, y - 4), (x + 11, y), (x + 7, y + 4), (x + 3, y)), colours.ink))
    if label:
        scene.add(Text(x + 16, y + 3.4, label, 9.5, colours.ink))


def _runs(panel: Panel, states: Sequence[State]) -> Iterator[tuple[State, float, float]]:
    """Equal states beside each other as one: the state, its left edge and its width."""
    at = 0
    for state, group in itertools.groupby(states):
        count = len(list(group))
        yield state, panel.left + panel.pitch * at, panel.pitch * count - GAP
        at += count
