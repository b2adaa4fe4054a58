"""What stands around a drawing over moments: the head above, the moments below, and under them what struck.

The rules: the title wraps and is never cut off without need; a cause stands under the moment at which it struck; alarm
is for what failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagkit.views import cells, palette, words
from diagkit.views.scene import Scene, Text, wrap
from diagkit.views.story import Story
from diagkit.views.verdict import Verdict

__all__ = ["GAP", "MARGIN", "Panel", "head", "moments_below", "notes_below", "tone"]

MARGIN = 20.0
GAP = 8.0


@dataclass(frozen=True, slots=True)
class Panel:
    """One story's part of the figure."""

    story: Story
    verdict: Verdict
    name: str
    own: str  # circumstances that the other panel does not share
    left: float
    pitch: float  # from one column to the next

    @property
    def cell(self) -> float:
        return self.pitch - GAP

    @property
    def width(self) -> float:
        return self.pitch * len(self.story.columns) - GAP


def head(scene: Scene, title: str, around: str, sentence: str = "", colour: str = palette.INK) -> float:
    """Title, what came of it, circumstances. Returns the lower edge."""
    y = 14.0
    room = scene.width - 2 * MARGIN
    for part in wrap(title, room, 17, 2, bold=True):
        y += 22
        scene.add(Text(MARGIN, y, part, 17, bold=True, tip=title))
    if sentence:
        y += 3
        for part in wrap(sentence, room, 13, 2):
            y += 18
            scene.add(Text(MARGIN, y, part, 13, colour, tip=sentence))
    y += 3
    for part in wrap(around, room, 11.5, 2):
        y += 16
        scene.add(Text(MARGIN, y, part, 11.5, palette.MUTED, tip=around))
    return y + 20


def tone(verdict: Verdict) -> str:
    """Alarm where something failed; a split that nothing has met is told in plain ink."""
    return palette.GOOD if verdict.good else palette.BAD if verdict.failed else palette.INK


def moments_below(scene: Scene, panels: Sequence[Panel], y: float) -> float:
    """What each column is, and the mark of its note."""
    lowest = y
    for panel in panels:
        marks = {note.column: note for note in words.notes(panel.story, panel.verdict)}
        for c, column in enumerate(panel.story.columns):
            centre = panel.left + panel.pitch * c + panel.cell / 2
            colour = palette.BAD if column.failed else palette.INK if column.changed or c == 0 else palette.MUTED
            at = y + 2
            for line in words.moment_label(column, panel.pitch - 4, 10.5):
                at += 13
                scene.add(Text(centre, at, line, 10.5, colour, anchor="middle", tip=words.moment_name(column)))
            if (note := marks.get(c)) is not None:
                at += 19
                cells.number(scene, centre, at - 4, note.number, note.bad)
            lowest = max(lowest, at)
    return lowest + 8


def notes_below(scene: Scene, panels: Sequence[Panel], y: float) -> float:
    """Causes and failures, under the panel that they belong to; a lone panel's may use the whole width."""
    lowest = y
    for panel in panels:
        left, room = (panel.left, panel.width) if len(panels) > 1 else (MARGIN, scene.width - 2 * MARGIN)
        at = y
        for note in words.notes(panel.story, panel.verdict):
            cells.number(scene, left + 8, at + 11, note.number, note.bad)
            for part in wrap(note.text, room - 24, 11.5, 6 if len(panels) > 1 else 3):
                at += 15
                scene.add(Text(left + 24, at, part, 11.5, palette.BAD if note.bad else palette.MUTED, tip=note.text))
            at += 8
        lowest = max(lowest, at)
    return lowest
