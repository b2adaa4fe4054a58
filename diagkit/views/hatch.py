"""Hatches: what a colour says, said once more in lines, for eyes and printers that see no colours."""

from __future__ import annotations

from diagkit.views.scene import Line, Scene

__all__ = ["diagonal", "horizontal", "vertical"]

STEP = 6.0


def diagonal(scene: Scene, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Rising lines, cut at the box's edges."""
    at = STEP
    while at < width + height:
        # The line x + y = at, from the left or lower edge to the upper or right one.
        x1, y1 = (at - height, height) if at > height else (0.0, at)
        x2, y2 = (width, at - width) if at > width else (at, 0.0)
        scene.add(Line(x + x1, y + y1, x + x2, y + y2, colour, 1.0))
        at += STEP


def horizontal(scene: Scene, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Level lines."""
    at = STEP / 2
    while at < height:
        scene.add(Line(x, y + at, x + width, y + at, colour, 1.0))
        at += STEP


def vertical(scene: Scene, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Upright lines."""
    at = STEP / 2
    while at < width:
        scene.add(Line(x + at, y, x + at, y + height, colour, 1.0))
        at += STEP
