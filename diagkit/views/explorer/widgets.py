"""The explorer's widgets: they turn what a hand chooses into a choice, and a choice into what the eye sees.

The rules: nothing is worked out here; every control is one that the browser itself focuses and moves by keyboard; a
control that the program sets does not choose in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from diagkit.errors import DiagkitError
from diagkit.trace.schema import BUFFER, PARAMETER
from diagkit.views.explorer.model import moment_text
from diagkit.views.explorer.page import picture
from diagkit.views.explorer.panes import cause_pane, finding_title, line_of, state_pane

if TYPE_CHECKING:
    from diagkit.views.explorer.explorer import Explorer

__all__ = ["build"]

WIDE = widgets.Layout(width="auto")
#: The controls that choose by themselves, by what they choose.
CHOICES = ("run", "rank", "phase", "pattern", "moment", "tensor")
# A dropdown takes None for "nothing is chosen" and shows no option.
NO_PHASE, NO_FINDING, NO_TENSOR = 0, -1, ""


def build(explorer: Explorer) -> Any:
    """The widget of an explorer; choices made by program show in it, too, at the next change by hand."""
    return _Controls(explorer).box


class _Controls:
    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self._setting = False
        exploration = explorer.exploration
        runs = [(name, number) for number, name in enumerate(exploration.names)]
        self.run = widgets.Dropdown(options=runs, description="Run")
        self.rank = widgets.Dropdown(description="Rank")
        self.phase = widgets.Dropdown(description="Phase")
        self.pattern = widgets.Text(description="Filter", placeholder="part of a name, or *.q_proj.*")
        self.moment = widgets.SelectionSlider(
            options=[("", 0)], description="Moment", continuous_update=True, readout=False, layout=WIDE
        )
        self.at = widgets.Dropdown(description="At", layout=WIDE)  # the slider's twin, with names
        self.state = widgets.HTML(layout=WIDE)
        self.cause = widgets.HTML(layout=WIDE)
        self.finding = widgets.Dropdown(description="Finding", layout=WIDE)
        self.tensor = widgets.Dropdown(description="Lifeline", layout=WIDE)
        self.life = widgets.HTML(layout=WIDE)
        self.svg = widgets.Button(description="Save as SVG")
        self.html = widgets.Button(description="Save as page")
        self.told = widgets.HTML()
        choosers = [self.run] * (len(runs) > 1) + [self.rank, self.phase, self.pattern]
        self.box = widgets.VBox(
            [
                widgets.HBox(choosers, layout=widgets.Layout(flex_flow="row wrap")),
                self.finding,
                self.moment,
                self.at,
                self.state,
                self.cause,
                self.tensor,
                self.life,
                widgets.HBox([self.svg, self.html, self.told]),
            ]
        )
        for name in CHOICES:
            getattr(self, name).observe(self._chosen, "value")
        self.at.observe(self._set_moment, "value")
        self.finding.observe(self._jumped, "value")
        self.svg.on_click(lambda _: self._save("explorer.svg"))
        self.html.on_click(lambda _: self._save("explorer.html"))
        self._show()

    # ---- from the hand

    def _chosen(self, change: dict[str, Any]) -> None:
        """A control was moved."""
        if self._setting:
            return
        name = next(name for name in CHOICES if getattr(self, name) is change["owner"])
        with self._telling():
            self.explorer.choose(**{name: (change["new"] or None) if name == "phase" else change["new"]})

    def _set_moment(self, change: dict[str, Any]) -> None:
        if not self._setting:
            self.moment.value = change["new"]

    def _jumped(self, change: dict[str, Any]) -> None:
        if self._setting:
            return
        with self._telling():
            if change["new"] == NO_FINDING:
                self.explorer.choose(finding=None)
            else:
                self.explorer.jump(change["new"])

    def _save(self, name: str) -> None:
        with self._telling():
            self.told.value = f"Written: {self.explorer.save(name)}, beside the notebook."

    # ---- to the eye

    def _show(self) -> None:
        """All controls and panes as the explorer's choice has them."""
        exploration, choice = self.explorer.exploration, self.explorer.choice
        shown = self.explorer.shown
        trace = exploration.traces[choice.run]
        rank = trace[choice.rank]
        moments = exploration.moments(choice)
        findings = range(len(exploration.findings(choice.run)))
        found = [(finding_title(exploration, choice.run, n), n) for n in findings]
        none = f"all tensors; {len(found)} finding{'s' * (len(found) != 1)}" if found else "no residency hazard found"
        tensors = [line.names[0] for line in shown.lines if line.kind in (PARAMETER, BUFFER)]
        if choice.tensor and choice.tensor not in tensors:
            tensors.insert(0, choice.tensor)
        phases = [(name, ordinal or NO_PHASE) for name, ordinal in exploration.phases(choice)]
        named = [(moment_text(rank, moment), moment.index) for moment in moments] or [("no moment", 0)]
        with self._quietly():
            self.run.value = choice.run
            _set(self.rank, [(str(number), number) for number in trace.ranks], choice.rank)
            _set(self.phase, phases, choice.phase or NO_PHASE)
            for control in (self.moment, self.at):
                _set(control, named, choice.moment)
            _set(self.finding, [(none, NO_FINDING), *found], NO_FINDING if choice.finding is None else choice.finding)
            _set(self.tensor, [("none", NO_TENSOR), *((name, name) for name in tensors)], choice.tensor)
            self.pattern.value = choice.pattern
        self.state.value = state_pane(shown)
        runs = ["A", "B"] if len(shown.moments) > 1 else [""]
        self.cause.value = "".join(map(cause_pane, shown.moments, runs))
        self.life.value = picture(exploration, choice) if choice.tensor else ""

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        self._setting = True
        try:
            yield
        finally:
            self._setting = False

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Shows what came of it; a mistake is told in one line beside the buttons, not lost in a log."""
        self.told.value = ""
        try:
            yield
            self._show()
        except DiagkitError as error:
            self.told.value = line_of([str(error)])


def _set(control: Any, options: list[Any], value: Any) -> None:
    """Options and value at once; options that are the same are not sent again."""
    known = list(control.options)
    if known != options:
        control.options = options
    control.value = value
