"""The what-if laboratory as widgets: choose, read the forecast, bet, run, see.

Rules of this module: it shows a `Bench` and asks it for everything; nothing is decided here. `WhatIf.to_html` is its
form for a page without a kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from diagkit.demo.experiments import ENGINES, REVISIONS, group_names
from diagkit.demo.scenario import INITS, STEPS, Scenario
from diagkit.errors import UsageError
from diagkit.views import palette
from diagkit.views.fallback import show
from diagkit.views.figure import page
from diagkit.views.html import STYLE
from diagkit.views.whatif_bench import MAX_RANKS, NOTHING, Bench, Run

__all__ = ["WhatIf", "whatif"]

_ENGINE_NAMES = {"fsdp": "FSDP engine", "veomni": "VeOmni engine"}
_NONE = ""  # no bet; a Dropdown shows nothing for a None
_FLAGS = {
    "offload_policy": "CPUOffloadPolicy: FSDP2 keeps the parameters on the CPU",
    "pin_memory": "the policy's pin_memory: host memory that an accelerator reads directly",
    "param_offload": "the engine moves the model to the CPU and back by hand",
    "optimizer_offload": "the engine moves the optimizer's state to the CPU and back by hand",
}


def whatif(
    scenario: Scenario | None = None, ranks: int = 2, device: str = "auto", out: str | Path | None = None
) -> WhatIf:
    """A laboratory to change one thing about an engine, bet on what will happen, and see it happen on real ranks.

    Args:
        scenario: what is chosen at first; by default the bug report's save.
        ranks: processes, 1 to 4.
        device: ``auto``, ``sim``, ``npu`` or ``cuda``.
        out: folder for the traces; by default a temporary one.

    Example::

        whatif(Scenario("veomni", "#7103", ("train", "export"), cpu_backend=False))
    """
    start = scenario or Scenario("fsdp", "before", ("train", "save"))
    return WhatIf(Bench(start, ranks, device, out))


class WhatIf:
    """Widgets over ``bench``, which can be used by itself, too: what it runs is shown here.

    ``close()`` ends the warm process that its runs start from; the kernel's end does, too.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._lock = threading.RLock()  # runs end, and their progress is told, in other threads
        self._choices = _choices(bench)
        self._steps = widgets.TagsInput(
            value=list(bench.scenario.steps),
            allowed_tags=list(STEPS),
            allow_duplicates=True,
            tooltip="drag to change the order",
        )
        self._bet = widgets.Dropdown(description="My bet:", layout=widgets.Layout(width="230px"))
        self._run = widgets.Button(description="Run", button_style="primary", icon="play")
        self._cancel = widgets.Button(description="Cancel", icon="stop")
        self._bar = widgets.IntProgress(min=0, layout=widgets.Layout(width="180px"))
        self._state = widgets.HTML()
        self._told = widgets.HTML(layout=widgets.Layout(min_width="420px", flex="1 1 480px"))
        self._found = widgets.HTML()
        self._box = self._laid_out()
        for name, control in self._choices.items():
            control.observe(lambda change, name=name: self._chosen(name, change.new), "value")
        self._steps.observe(lambda change: self._chosen("steps", tuple(change.new)), "value")
        self._bet.observe(self._placed, "value")
        self._run.on_click(lambda _: self._start())
        self._cancel.on_click(lambda _: bench.cancel())
        bench.watch(self._show)
        self._show()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.bench.scenario.name}, {len(self.bench.runs)} runs>"

    def _ipython_display_(self) -> None:
        show(self._box, self.to_html())

    def to_html(self, whole_page: bool = False) -> str:
        """The forecast and what the runs so far found, as a fragment or a whole page that needs no kernel."""
        told = self._told.value + self._found.value
        return page(f"What if: {self.bench.scenario.name}", told) if whole_page else told

    def close(self) -> None:
        """End the warm process; what is shown stays."""
        self.bench.close()

    # ---- the layout

    def _laid_out(self) -> widgets.Widget:
        choice = self._choices
        adding = [self._adding(step) for step in STEPS]
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        controls = widgets.VBox(
            [
                _heading("The engine"),
                *(choice[name] for name in ("engine", "revision")),
                widgets.Box([choice[name] for name in _FLAGS], layout=row),
                *(choice[name] for name in ("init", "cpu_backend", "ranks")),
                _heading("What is done to it, in this order"),
                self._steps,
                widgets.Box(adding, layout=row),
            ],
            layout=widgets.Layout(width="400px", flex="0 0 400px"),
        )
        doing = widgets.Box([self._bet, self._run, self._cancel, self._bar, self._state], layout=row)
        return widgets.VBox(
            [
                widgets.Box([controls, self._told], layout=widgets.Layout(flex_flow="row wrap")),
                doing,
                self._found,
            ]
        )

    def _adding(self, step: str) -> widgets.Button:
        button = widgets.Button(
            description=step, icon="plus", tooltip=STEPS[step], layout=widgets.Layout(width="118px")
        )
        button.on_click(lambda _: self._chosen("steps", (*self.bench.scenario.steps, step)))
        return button

    # ---- what the user does

    def _chosen(self, name: str, value: Any) -> None:
        with self._lock:
            scenario = self.bench.scenario
            if value != (self.bench.ranks if name == "ranks" else getattr(scenario, name)):
                self.bench.choose(**{name: value})

    def _placed(self, change: Any) -> None:
        with self._lock:
            if change.new != (self.bench.bet or _NONE):
                self.bench.place(change.new or None)

    def _start(self) -> None:
        try:
            self.bench.start()
        except UsageError as error:  # a scenario that no engine knows, or a second click
            self._state.value = _problem(str(error))
            return
        threading.Thread(target=self._follow, name="diagkit-whatif-progress", daemon=True).start()

    def _follow(self) -> None:
        while True:
            begun = self.bench.progress
            with self._lock:
                if not self.bench.running:
                    return
                self._bar.value = len(begun)
                self._state.value = f"step {len(begun)}: {escape(begun[-1])} …" if begun else "starting the ranks …"
            time.sleep(0.3)

    # ---- what is shown

    def _show(self) -> None:
        """Bring every widget to what the bench says; called from whichever thread changed it."""
        with self._lock:
            bench, last = self.bench, self.bench.runs[-1] if self.bench.runs else None
            for name, control in self._choices.items():
                control.value = bench.ranks if name == "ranks" else getattr(bench.scenario, name)
            self._steps.value = list(bench.scenario.steps)
            names = bench.scenario.names
            bets = [("none", _NONE), ("nothing fails", NOTHING), *((f"{name} fails first", name) for name in names)]
            if self._bet.options != tuple(bets):
                self._bet.options = bets
            self._bet.value = bench.bet or _NONE
            for control in (*self._choices.values(), self._steps, self._bet, self._run):
                control.disabled = bench.running
            self._cancel.disabled = not bench.running
            self._bar.max = len(names)
            self._bar.value = 0 if bench.running or bench.problem or last is None else len(names)
            self._state.value = self._words(last)
            shown = last if last is not None and last.life.scenario == bench.scenario and not bench.running else None
            self._told.value = _steps_html(bench, shown)
            if not bench.running:
                self._found.value = _figures(bench)

    def _words(self, last: Run | None) -> str:
        if self.bench.running:
            return "starting the ranks …"
        if self.bench.problem:
            return _problem(self.bench.problem)
        if last is None:
            return "Read the forecast, bet, and run."
        return f"run {last.number}: {escape(last.verdict)}"


def _choices(bench: Bench) -> dict[str, Any]:
    """The controls by the name of what they change."""
    both, alone = group_names("npu")
    wide = {"layout": widgets.Layout(width="380px"), "style": {"description_width": "110px"}}
    flat = {"layout": widgets.Layout(width="185px"), "style": {"description_width": "0"}}
    flags = {
        name: widgets.Checkbox(description=name, tooltip=meaning, indent=False, **flat)
        for name, meaning in _FLAGS.items()
    }
    return {
        "engine": widgets.Dropdown(description="engine", options=[(_ENGINE_NAMES[e], e) for e in ENGINES], **wide),
        "revision": widgets.Dropdown(description="revision", options=list(REVISIONS), **wide),
        **flags,
        "init": widgets.Dropdown(
            description="built on", options=[(text.partition(":")[0], name) for name, text in INITS.items()], **wide
        ),
        "cpu_backend": widgets.Dropdown(
            description="process group", options=[(both, True), (f"{alone} alone", False)], **wide
        ),
        "ranks": widgets.Dropdown(description="ranks", options=list(range(1, MAX_RANKS + 1)), **wide),
    }


def _problem(text: str) -> str:
    return f'<span style="color:{palette.BAD}">{escape(text)}</span>'


def _heading(text: str) -> widgets.Widget:
    return widgets.HTML(f"<b>{escape(text)}</b>")


def _steps_html(bench: Bench, run: Run | None) -> str:
    """The forecast step by step, and beside it what came out, once it has."""
    try:
        forecast = bench.forecast
    except UsageError as error:
        return _problem(str(error))
    rows = []
    for place, told in enumerate(forecast):
        found = run.life.steps[place] if run is not None else None
        came = (
            ""
            if found is None
            else found.message or (f"works, tensors on {found.exported}" if found.exported else "works")
        )
        if found is not None and found.outcome not in ("ok", "crash"):
            came = found.outcome
        moves = f'<br><span class="quiet">moves the model {escape(told.moves)}</span>' if told.moves else ""
        rows.append([
            escape(told.step),
            f'<span class="{_tone(told.outcome)}">{escape(told.text)}</span>{moves}',
            "" if found is None else f'<span class="{_tone(found.outcome)}">{escape(came)}</span>',
        ])  # fmt: skip
    heads = ("step", "foretold", "found" if run is not None else "")
    return f'<div class="dkt"><style>{STYLE}{_WRAP}</style>{_table(heads, rows)}</div>'


_WRAP = ".dkt .steps td{white-space:normal;max-width:26em;line-height:1.35}"


def _tone(outcome: str) -> str:
    return {"ok": "good", "crash": "bad", "no answer": "bad"}.get(outcome, "quiet")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return f'<table class="steps"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _figures(bench: Bench) -> str:
    if not bench.runs:
        return ""
    try:
        where = bench.map().to_html()
    except UsageError as error:  # a life that ended before there were tensors
        where = f"<p>{escape(str(error))}</p>"
    return bench.matrix().to_html() + where
