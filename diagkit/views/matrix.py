"""The outcome matrix: which operation of which engine works at which revision. The history of a fix at one glance.

The rules: a cell shows what happened, never what should have; what works is quiet; equal failures share a number and
are told once beneath; a cell that came out unlike its expectation says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from diagkit.errors import UsageError
from diagkit.language import msg, tr, trn
from diagkit.views import palette
from diagkit.views.cells import number
from diagkit.views.figure import ViewFigure
from diagkit.views.scene import Line, Rect, Scene, Text, clean, shorten, text_width, wrap
from diagkit.views.words import table

__all__ = ["Outcome", "outcome_matrix", "outcomes"]

MARGIN = 20.0
ROW = 26.0
#: Outcomes that the demo knows, for the catalogues; another word is told as it is.
KNOWN = (msg("ok"), msg("crash"), msg("no answer"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell. ``outcome`` is ``"ok"``, ``"crash"`` or another word; ``detail`` a few words more; ``unlike`` says it
    was not expected.
    """

    group: str
    engine: str
    revision: str
    operation: str
    outcome: str
    exception: str = ""
    detail: str = ""
    unlike: bool = False

    @property
    def row(self) -> tuple[str, str, str]:
        return self.group, self.engine, self.revision


def outcomes(cells: Iterable[Any]) -> list[Outcome]:
    """The cells of `diagkit demo`, as objects or as its JSON, or any mappings with the keys engine, revision,
    operation, outcome and, if they like, group, flags, without, exception (a text, or type and message), exported,
    differences.

    Raises:
        UsageError: there is none, or one lacks a key.
    """
    found = []
    for cell in cells:
        if isinstance(cell, Outcome):
            found.append(cell)
            continue
        if not isinstance(cell, Mapping) and not hasattr(cell, "to_json"):
            _no_cell(cell)
        data = cell if isinstance(cell, Mapping) else cell.to_json()
        if missing := [key for key in ("engine", "revision", "operation", "outcome") if key not in data]:
            raise UsageError(
                "a cell of an outcome matrix is incomplete", found=f"keys {', '.join(data)}", expected=missing[0]
            )
        found.append(_outcome(data))
    if not found:
        raise UsageError("an outcome matrix needs at least one cell")
    return found


def _no_cell(thing: object) -> NoReturn:
    raise UsageError(
        "no cells of an outcome matrix",
        found=type(thing).__name__,
        expected="cells of diagkit demo, as objects or as its JSON",
        remedy="A trace is drawn by residency_map",
    )


def outcome_matrix(
    cells: Iterable[Any], *, title: str | None = None, around: str = "", width: int = 1000
) -> ViewFigure:
    """Engines and revisions down, operations across.

    Args:
        cells: what `outcomes` takes.
        title: in place of the sentence that the figure finds by itself.
        around: the circumstances, such as ``"2 ranks, torch 2.13.0"``; found in the demo's cells unless given.
        width: in pixels at 100 dpi.

    Raises:
        UsageError: there is no cell, or one lacks a key.
    """
    given = list(cells) if isinstance(cells, Iterable) else _no_cell(cells)
    found = outcomes(given)
    around = around or _around(given)
    title = title or _title(found)
    grid = _Grid.of(found)
    scene = Scene(width, 0, title, _text(title, around, grid))
    y = 14.0
    for part in wrap(title, width - 2 * MARGIN, 17, 2, bold=True):
        y += 22
        scene.add(Text(MARGIN, y, part, 17, bold=True, tip=title))
    for part in wrap(around, width - 2 * MARGIN, 11.5, 2) if around else []:
        y += 18
        scene.add(Text(MARGIN, y, part, 11.5, palette.MUTED))
    scene.height = _draw(scene, grid, y + 14) + 16
    return ViewFigure(scene)


@dataclass(frozen=True, slots=True)
class _Grid:
    rows: tuple[tuple[str, str, str], ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[tuple[str, str, str], str], Outcome]
    messages: tuple[str, ...]

    @classmethod
    def of(cls, found: Sequence[Outcome]) -> _Grid:
        messages = dict.fromkeys(cell.exception for cell in found if cell.exception)
        return cls(
            tuple(dict.fromkeys(cell.row for cell in found)),
            tuple(dict.fromkeys(cell.operation for cell in found)),
            {(cell.row, cell.operation): cell for cell in found},
            tuple(messages),
        )

    def mark(self, cell: Outcome) -> int:
        """The number under which the cell's exception is told; 0 where it has none."""
        return self.messages.index(cell.exception) + 1 if cell.exception else 0


def _draw(scene: Scene, grid: _Grid, y: float) -> float:
    groups = list(dict.fromkeys(group for group, _, _ in grid.rows))
    named = max((text_width(_engine(engine), 12, True) for _, engine, _ in grid.rows), default=0.0)
    revised = max(text_width(revision, 11.5) for _, _, revision in grid.rows)
    named, revised = min(named, 150.0), min(revised, 200.0)
    left = MARGIN + named + 18 + revised + 18
    pitch = min((scene.width - left - MARGIN + 6) / len(grid.columns), 150.0)
    for group in groups:
        if group:
            y += 14
            room = left - MARGIN - 8
            heading = tr("process group {group}", group=group)
            heading = heading if text_width(heading, 11.5) <= room else shorten(group, room, 11.5)
            scene.add(Text(MARGIN, y + 4, heading, 11.5, palette.MUTED, tip=tr("process group {group}", group=group)))
        top = y
        for c, operation in enumerate(grid.columns):
            at = y - 9
            for part in wrap(operation, pitch - 8, 11.5, 2):
                at += 13
                scene.add(Text(left + pitch * c + (pitch - 6) / 2, at, part, 11.5, anchor="middle"))
            top = max(top, at)
        y = top + 8
        previous = ""
        for row in (row for row in grid.rows if row[0] == group):
            _, engine, revision = row
            if engine != previous:
                if previous:
                    scene.add(Line(MARGIN, y + 3, left + pitch * len(grid.columns) - 6, y + 3, palette.FAINT))
                    y += 8
                scene.add(Text(MARGIN, y + 14.5, shorten(_engine(engine), named, 12, True), 12, bold=True))
                previous = engine
            scene.add(Text(MARGIN + named + 18, y + 14.5, shorten(revision, revised, 11.5), 11.5, tip=revision))
            for c, operation in enumerate(grid.columns):
                cell = grid.cells.get((row, operation))
                _cell(scene, left + pitch * c, y, pitch - 6, cell, grid)
            y += ROW
        y += 12
    for i, message in enumerate(grid.messages, 1):
        number(scene, MARGIN + 8, y + 11, i, True)
        for part in wrap(message, scene.width - 2 * MARGIN - 24, 11.5, 3):
            y += 15
            scene.add(Text(MARGIN + 24, y, part, 11.5, palette.BAD, tip=message))
        y += 8
    return y


def _cell(scene: Scene, x: float, y: float, width: float, cell: Outcome | None, grid: _Grid) -> None:
    height = ROW - 5
    if cell is None:
        scene.add(Line(x + width / 2 - 5, y + height / 2, x + width / 2 + 5, y + height / 2, palette.FAINT, 2))
        return
    good = cell.outcome == "ok"
    told = f"{tr(cell.outcome)}, {cell.exception}" if cell.exception else tr(cell.outcome)
    tip = f"{_engine(cell.engine)} {cell.revision}, {cell.operation}: {told}"
    edge = palette.INK if cell.unlike else None
    scene.add(Rect(x, y, width, height, palette.GOOD_SOFT if good else palette.BAD, 4, edge, 2.0 if edge else 0.0, tip))
    mark = grid.mark(cell)
    words = (
        tr(cell.outcome)
        + (f", {cell.detail}" if cell.detail and good else "")
        + (tr(" (unexpected)") if cell.unlike else "")
    )
    text = shorten(words, width - (30 if mark else 12), 11)
    middle = x + width / 2 - (9 if mark else 0)
    scene.add(Text(middle, y + 14.5, text, 11, palette.GOOD if good else palette.GROUND, not good, "middle"))
    if mark:
        at = middle + text_width(text, 11, not good) / 2 + 11
        scene.add(Text(at, y + 14.5, f"{mark}", 10, palette.GROUND, anchor="middle"))
        scene.add(Rect(at - 7, y + height / 2 - 7, 14, 14, None, 7, palette.GROUND, 1.0))


def _outcome(data: Mapping[str, Any]) -> Outcome:
    exception = data.get("exception")
    if isinstance(exception, Mapping):
        exception = f"{exception.get('type', '')}: {exception.get('message', '')}"
    without = data.get("without") or ()
    flags = {"policy": "", "both": tr(" (both flags)"), "manual": tr(" (no policy)")}.get(
        str(data.get("flags") or "policy"), ""
    )
    operation = {"move": "move + state_dict"}.get(str(data["operation"]), data["operation"])  # as the demo does
    outcome = clean(str(data["outcome"]))
    detail = str(data.get("exported") or "")
    return Outcome(
        clean(str(data.get("group") or "")),
        clean(str(data["engine"])),
        clean(str(data["revision"]) + (tr(" without {guards}", guards=", ".join(without)) if without else "")),
        clean(f"{operation}{flags}"),
        outcome,
        "" if outcome == "ok" else clean(str(exception or "")),
        clean(tr("on {device}", device=detail) if detail else str(data.get("detail") or "")),
        bool(data.get("differences")),
    )


def _engine(name: str) -> str:
    return {"fsdp": tr("FSDP engine"), "veomni": tr("VeOmni engine")}.get(name, name)


def _title(found: Sequence[Outcome]) -> str:
    revisions = list(dict.fromkeys(cell.revision for cell in found))

    def failing(revision: str) -> str:
        mine = [cell for cell in found if cell.revision == revision]
        bad = sum(cell.outcome != "ok" for cell in mine)
        whole = {c.operation for c in mine} - {c.operation for c in mine if c.outcome == "ok"}
        if (
            revision != revisions[0]
            and 0 < bad < len(mine)
            and all(c.outcome == "ok" or c.operation in whole for c in mine)
        ):  # what fails, fails everywhere: its name tells more than a number
            text = msg("only {operations} still fails") if len(whole) == 1 else msg("only {operations} still fail")
            return tr(text, operations=tr(" and ").join(sorted(whole)))
        if not bad:
            return tr("none of {count} operations fail", count=len(mine))
        text = msg("{bad} of {count} operations fails") if bad == 1 else msg("{bad} of {count} operations fail")
        return tr(text, bad=bad, count=len(mine))

    def at(revision: str) -> str:
        known = {"before": tr("Before the fix"), "current": tr("in the current code")}
        return known.get(revision) or tr("at {revision}", revision=revision)

    first = tr("{when}, {what}", when=at(revisions[0]), what=failing(revisions[0]))
    first = first[:1].upper() + first[1:]
    last = tr("{when}, {what}", when=at(revisions[-1]), what=failing(revisions[-1]))
    return first if len(revisions) == 1 else f"{first}; {last}"


def _around(cells: Sequence[Any]) -> str:
    """Device and ranks, from the demo's own cells."""
    data = next((c if isinstance(c, Mapping) else c.to_json() for c in cells if not isinstance(c, Outcome)), {})
    words = []
    if ranks := data.get("ranks"):
        words.append(trn("{count} rank", "{count} ranks", ranks))
    if device := data.get("device"):
        words.append(
            tr("simulated {device}: the device is simulated, FSDP2 and the processes are real", device=device)
            if data.get("simulated")
            else device
        )
    return clean(" · ".join(map(str, words)))


def _text(title: str, around: str, grid: _Grid) -> str:
    out = [title, *([around] if around else [])]
    for group in dict.fromkeys(group for group, _, _ in grid.rows):
        rows = [[tr("engine"), tr("revision"), *grid.columns]]
        for row in (row for row in grid.rows if row[0] == group):
            rows.append([row[1], row[2], *(_words(grid, grid.cells.get((row, c))) for c in grid.columns)])
        out += ["", *([tr("process group {group}", group=group)] if group else []), *table(rows)]
    out += [""] * bool(grid.messages) + [f"[{i}] {message}" for i, message in enumerate(grid.messages, 1)]
    return "\n".join(out)


def _words(grid: _Grid, cell: Outcome | None) -> str:
    if cell is None:
        return "-"
    words = tr(cell.outcome) if cell.outcome == "ok" else tr(cell.outcome).upper()
    words += f" {cell.detail}" if cell.detail and cell.outcome == "ok" else ""
    words += f" [{grid.mark(cell)}]" if cell.exception else ""
    return words + (tr(" (unexpected)") if cell.unlike else "")
