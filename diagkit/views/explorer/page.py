"""The explorer where nothing can be chosen: all at once, as small multiples, without script, kernel or network."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from diagkit.errors import DiagkitError, UsageError
from diagkit.trace.schema import BUFFER, PARAMETER
from diagkit.views import palette
from diagkit.views.explorer.folding import Line
from diagkit.views.explorer.model import Choice, Exploration
from diagkit.views.explorer.panes import cause_pane, findings_table, state_pane
from diagkit.views.figure import ViewFigure
from diagkit.views.grid import rank_grid
from diagkit.views.lifelines import lifeline_scene
from diagkit.views.maps import before_after, residency_map
from diagkit.views.painters import svg

__all__ = ["overview", "picture"]

#: Lifelines shown, one for all tensors that lived alike.
LIFELINES = 6

STYLE = f"""
.dkx{{font:14px/1.5 'DejaVu Sans',Verdana,sans-serif;color:{palette.INK};background:{palette.GROUND}}}
.dkx section{{margin:0 0 22px}} .dkx h3{{font-size:15px;margin:0 0 6px}}
.dkx td{{white-space:normal!important}} .dkx tbody th{{min-width:12em}}
.dkx .many{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}}
.dkx .many>div{{border:1px solid {palette.FAINT};border-radius:6px;overflow:hidden}}
""".strip()


def picture(exploration: Exploration, choice: Choice) -> str:
    """The chosen tensor's lifeline, or the map of the chosen phase, as one SVG element."""
    if choice.tensor:
        rank = exploration.traces[choice.run][choice.rank]
        span = [moment.index for moment in exploration.moments(choice)]
        try:
            return svg(lifeline_scene(rank, choice.tensor, span[0], span[-1], at=choice.moment))
        except UsageError:  # it is not there in this phase
            return svg(lifeline_scene(rank, choice.tensor, at=choice.moment))
    return _map(exploration, choice).to_svg()


def overview(exploration: Exploration, choice: Choice) -> str:
    """An HTML fragment: the map, the findings, the chosen moment, and a lifeline for every way of life."""
    parts = [_section("Where everything was", _drawn(lambda: _map(exploration, choice)))]
    parts += [_section("What is wrong", findings_table(exploration, run)) for run in range(len(exploration.traces))]
    shown = exploration.shown(choice)
    parts.append(_section("The chosen moment", state_pane(shown) + cause_pane(shown.moments[0])))
    lives = {line.ways[0]: line.names[0] for line in reversed(shown.lines) if _lives(line)}
    rank = exploration.traces[choice.run][choice.rank]
    if lives:
        names = [*reversed(lives.values())][:LIFELINES]
        many = "".join(f"<div>{svg(lifeline_scene(rank, name, width=620, moments=6))}</div>" for name in names)
        parts.append(
            _section("Every history that tensors had, with one tensor of each", f'<div class="many">{many}</div>')
        )
    trace = exploration.traces[choice.run]
    if trace.world_size > 1:
        parts.append(_section("Ranks", _drawn(lambda: rank_grid(trace))))
    return f'<div class="dkx"><style>{STYLE}</style>{"".join(parts)}</div>'


def _map(exploration: Exploration, choice: Choice) -> ViewFigure:
    """The residency map of the chosen phase, or both runs' beside each other."""
    trace = exploration.traces[choice.run]
    phase = trace[choice.rank].phases[choice.phase].name if choice.phase else None
    only = choice.pattern.strip() or None
    if len(exploration.traces) == 1:
        return residency_map(trace, rank=choice.rank, phase=phase, only=only)
    first, second = exploration.traces
    names = exploration.names[0], exploration.names[1]
    try:
        return before_after(first, second, names=names, rank=choice.rank, phase=phase, only=only)
    except DiagkitError:  # the other run has no such phase, rank or tensor
        return residency_map(trace, rank=choice.rank, phase=phase, only=only)


def _drawn(figure: Callable[[], ViewFigure]) -> str:
    """The figure's HTML, or the reason why there is none: what else there is must be seen all the same."""
    try:
        return figure().to_html()
    except UsageError as error:
        return f"<p>{escape(str(error))}</p>"


def _lives(line: Line) -> bool:
    """Whether a lifeline can be drawn of it: it is the model's, and was there at all."""
    return line.kind in (PARAMETER, BUFFER) and any(line.ways[0] or ())


def _section(title: str, body: str) -> str:
    return f"<section><h3>{escape(title)}</h3>{body}</section>"
