"""How one cell looks, and the legend that says it: colour for the device, a dot for pinned, outline and triangles for
a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.language import tr
from diagkit.trace.schema import device_type
from diagkit.views import palette
from diagkit.views.scene import Dot, Line, Polygon, Rect, Scene, Text, text_width
from diagkit.views.story import Cell

__all__ = ["Cell", "Look", "draw", "legend", "number"]

NAME = 9.0  # size of a device's name in a cell


@dataclass(frozen=True, slots=True)
class Look:
    """``named``: write the device, it differs from the cell before. ``fault``: a split here is one, not in passing."""

    named: bool = False
    fault: bool = True
    tip: str = ""


def draw(scene: Scene, x: float, y: float, width: float, height: float, cell: Cell | None, look: Look) -> None:
    """One cell."""
    if cell is None:
        middle = y + height / 2
        scene.add(Line(x + width / 2 - 5, middle, x + width / 2 + 5, middle, palette.FAINT, 2))
        return
    if cell.split:
        _split(scene, x, y, width, height, cell, look)
        return
    colours = palette.device(cell.storage)
    scene.add(Rect(x, y, width, height, colours.fill, 4, tip=look.tip))
    if look.named:
        text = device_type(cell.storage) or "?"
        scene.add(Text(x + 7, y + height / 2 + 3.2, _fit(text, width - 20), NAME, colours.ink))
    _marks(scene, x, y, width, height, cell)


def _split(scene: Scene, x: float, y: float, width: float, height: float, cell: Cell, look: Look) -> None:
    above, below = palette.device(cell.metadata), palette.device(cell.storage)
    same_type = device_type(cell.metadata) == device_type(cell.storage)
    scene.add(Rect(x, y, width, height, below.fill, 4, tip=look.tip))
    inset = 1.0  # the triangle's corners stay under the outline
    left, top, right, bottom = x + inset, y + inset, x + width - inset, y + height - inset
    scene.add(Polygon(((left, top), (right, top), (left, bottom)), above.fill))
    if same_type:  # two devices of one type have one colour: a seam parts them
        scene.add(Line(left, bottom, right, top, palette.GROUND, 1.5))
    scene.add(
        Rect(x, y, width, height, None, 4, palette.BAD if look.fault else palette.MUTED, 2.4 if look.fault else 1.2)
    )
    if look.named:
        upper = cell.metadata if same_type else device_type(cell.metadata) or "?"
        lower = (cell.storage if same_type else device_type(cell.storage)) or "?"
        room = width / 2 - 6
        scene.add(Text(x + 5, y + 10.5, _fit(upper, room), 8.5, above.ink))
        edge = x + width - (12 if cell.pinned else 5)
        scene.add(Text(edge, y + height - 4.5, _fit(lower, room - 4), 8.5, below.ink, anchor="end"))
    _marks(scene, x, y, width, height, cell)


def _marks(scene: Scene, x: float, y: float, width: float, height: float, cell: Cell) -> None:
    if cell.pinned:
        scene.add(Dot(x + width - 7, y + height - 7, 2.2, palette.device(cell.storage).ink))
    if cell.apart:  # a broken link: the bytes that train are not the bytes that are gathered
        middle = x + width - 16
        scene.add(Rect(middle - 6, y + 4, 12, 12, palette.GROUND, 6, palette.BAD, 1.2))
        scene.add(Text(middle, y + 13.2, "≠", 9, palette.BAD, bold=True, anchor="middle"))


def number(scene: Scene, x: float, y: float, value: int, bad: bool) -> None:
    """The mark of a note, centred at the point."""
    scene.add(Dot(x, y, 7.5, palette.BAD if bad else palette.MUTED))
    scene.add(Text(x, y + 3.4, str(value), 9.5, palette.GROUND, bold=True, anchor="middle"))


def legend(scene: Scene, x: float, y: float, shown: Sequence[Cell], faults: bool, passing: bool) -> float:
    """One line (more where it must) that explains what is there, and nothing else. Returns the lower edge."""
    entries: list[tuple[Cell, Look, str]] = []
    plain = Look()
    devices = sorted({device_type(d) or "?" for c in shown for d in (c.metadata, c.storage) if d}, key=_order)
    entries += [(Cell(name, name), plain, name) for name in devices]
    pinned = next((c for c in shown if c.pinned), None)
    if pinned is not None:
        place = pinned.storage or "cpu"
        entries.append((Cell(place, place, pinned=True), plain, tr("pinned")))
    split = next((c for c in shown if c.split), None)
    if split is not None:
        pair = Cell(split.metadata, split.storage, split=True)
        teaches = tr("split: upper corner = what metadata says, lower = where the bytes are")
        quiet = tr("in passing: no fault")
        entries.append((pair, Look(fault=faults), teaches if faults else f"{teaches} ({quiet})"))
        if faults and passing:
            entries.append((pair, Look(fault=False), quiet))
    if any(c.apart for c in shown):
        entries.append((Cell("cpu", "cpu", apart=True), plain, tr("trains one tensor, gathers another")))
    at = x
    for cell, look, text in entries:
        width = 24 + 7 + text_width(text, 11.5)
        if at > x and at + width > scene.width - x:
            at, y = x, y + 24
        draw(scene, at, y, 24, 16, cell, look)
        scene.add(Text(at + 31, y + 12, text, 11.5))
        at += width + 18
    return y + 22


def _order(name: str) -> tuple[int, str]:
    return ({"cpu": 0, "meta": 2}.get(name, 1), name)


def _fit(text: str, room: float) -> str:
    return text if text_width(text, NAME) <= room else text[:3] if text_width(text[:3], NAME) <= room else ""
