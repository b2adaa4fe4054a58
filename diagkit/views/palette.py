"""Every colour of diagkit, in one place: the same device has the same colour in figures, notebooks, report and
terminal.

The rules: amber and blue stay apart for every kind of colour blindness and in grey print (they differ in lightness
too); no colour carries a meaning alone (a split has an outline and two triangles, pinning a dot, a device its written
name); crimson means "wrong" and nothing else; texts reach a contrast of 4.5 on their ground.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BAD", "FAINT", "GOOD", "GROUND", "INK", "MUTED", "Device", "device", "mark"]

INK = "#1f2937"  # text
MUTED = "#667080"  # what may be read later
FAINT = "#e6e9ee"  # rules, empty cells
GROUND = "#ffffff"
BAD = "#be1250"  # a split, a failure
BAD_SOFT = "#fbe9ef"
GOOD = "#1f7a45"  # a verdict
GOOD_SOFT = "#e8f3ec"


class Device(NamedTuple):
    """``fill`` for an area, ``ink`` for text upon it, ``ansi`` for a terminal (an SGR code)."""

    fill: str
    ink: str
    ansi: str


CPU = Device("#efb756", "#3d2a06", "33")
ACCELERATOR = Device("#3f74cf", "#ffffff", "34")
META = Device("#c9ced8", "#333b47", "90")
UNKNOWN = Device("#eef0f4", "#4b5563", "90")


def device(name: str | None) -> Device:
    """The colours of a device such as ``"cpu"``, ``"npu:0"`` or ``"meta"``; None is a device that could not be read."""
    if not name:
        return UNKNOWN
    kind = name.partition(":")[0]
    return {"cpu": CPU, "meta": META}.get(kind, ACCELERATOR)


def mark(text: str, code: str, colour: bool) -> str:
    """``text`` in an SGR colour for a terminal, or as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


ANSI_BAD = "1;31"
ANSI_MUTED = "2"
