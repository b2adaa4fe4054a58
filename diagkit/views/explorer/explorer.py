"""The explorer as an object: in a notebook it is widgets, in a program the same views by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagkit.errors import MissingDependency, UsageError
from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import BUFFER, PARAMETER
from diagkit.views.chosen import Source, opened
from diagkit.views.explorer.model import Choice, Exploration, Shown
from diagkit.views.explorer.page import overview, picture
from diagkit.views.figure import page
from diagkit.views.lifelines import find

__all__ = ["Explorer", "explore"]


def explore(trace: Source, other: Source | None = None, *, names: tuple[str, str] = ("Run A", "Run B")) -> Explorer:
    """Look through a trace, or through two side by side.

    In a notebook: a slider over the moments, choices of run, rank and phase, a filter by name, the findings (each leads
    to its moment), the cause and its stack, and a tensor's lifeline. Everything works by keyboard. Where no kernel
    runs, the same output shows a page of small multiples.

    Args:
        trace: a trace, one rank of it, the path of one, or what `inspect` returned.
        other: a second one, to be shown beside it.
        names: what the two runs are called.

    Raises:
        UsageError: no trace.
        TraceError: nothing at that path is a trace.
    """
    traces = [_whole(trace), *([_whole(other)] if other is not None else [])]
    return Explorer(Exploration(traces, names[: len(traces)]))


class Explorer:
    """An exploration and what is chosen in it. ``choose`` works as the widgets do; ``shown`` is what is to be seen."""

    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        self.choice = exploration.start()
        self._widget: Any = None

    def choose(self, **chosen: Any) -> Shown:
        """Choose anew: ``run``, ``rank``, ``phase`` (its ordinal), ``moment`` (an index), ``pattern``, ``finding`` (its
        number) or ``tensor`` (a name); what cannot be shown becomes the nearest that can.

        Raises:
            UsageError: nothing of that name can be chosen, or no such tensor.
        """
        if unknown := set(chosen) - set(Choice.__dataclass_fields__):
            expected = f"one of {', '.join(Choice.__dataclass_fields__)}"
            raise UsageError("nothing of that name can be chosen", found=min(unknown), expected=expected)
        if chosen.get("run", self.choice.run) != self.choice.run:
            chosen = {"finding": None, **chosen}  # each run has its own
        choice = self.exploration.mended(replace(self.choice, **chosen))
        rank = self.exploration.traces[choice.run][choice.rank]
        if chosen.get("tensor"):
            choice = replace(choice, tensor=find(rank, choice.tensor).name)
        elif choice.tensor not in {row.name for row in rank.rows if row.kind in (PARAMETER, BUFFER)}:
            choice = replace(choice, tensor="")  # the run or rank that was chosen does not have it
        self.choice = choice
        return self.shown

    def jump(self, finding: int) -> Shown:
        """To a finding of the chosen run, by its number from 0."""
        self.choice = self.exploration.jump(self.choice, finding)
        return self.shown

    @property
    def shown(self) -> Shown:
        """What is to be seen at the choice."""
        return self.exploration.shown(self.choice)

    @property
    def widget(self) -> Any:
        """The live explorer.

        Raises:
            MissingDependency: ipywidgets is not installed.
        """
        if self._widget is None:
            try:
                from diagkit.views.explorer.widgets import build
            except ImportError:
                raise MissingDependency(
                    "the explorer needs ipywidgets", remedy="pip install 'diagkit[notebook]'"
                ) from None
            self._widget = build(self)
        return self._widget

    def to_svg(self) -> str:
        """The chosen tensor's lifeline, or the map of the chosen phase, as one SVG element.

        Raises:
            UsageError: the trace, or what the filter leaves of it, has no tensor or no moment.
        """
        return picture(self.exploration, self.choice)

    def to_html(self, whole_page: bool = False) -> str:
        """All at once as small multiples, without script or outside reference: a fragment, or a whole page."""
        fragment = overview(self.exploration, self.choice)
        return page(" and ".join(self.exploration.names), fragment) if whole_page else fragment

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the view to a file: ``.svg`` for the picture, ``.html`` for the page. Returns its path.

        Raises:
            UsageError: another ending, a place that cannot be written, or nothing to draw in an SVG.
        """
        file = Path(path)
        if file.suffix not in (".svg", ".html"):
            raise UsageError(
                "the ending says what is saved", found=file.name, expected="a name ending in .svg or .html"
            )
        try:
            file.write_text(self.to_svg() + "\n" if file.suffix == ".svg" else self.to_html(whole_page=True), "utf-8")
        except OSError as error:
            raise UsageError("cannot write there", found=error.strerror or str(error), where=file) from None
        return file

    def _repr_html_(self) -> str:
        return self.to_html()

    def _ipython_display_(self) -> None:
        from diagkit.views.fallback import show

        show(self.widget, self.to_html())

    def __repr__(self) -> str:
        return f"<Explorer: {'; '.join(self.shown.heads)}>"


def _whole(source: Source) -> Trace:
    trace = opened(source)
    return Trace({trace.rank: trace}) if isinstance(trace, RankTrace) else trace
