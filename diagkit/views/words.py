"""What figures and their text twins say in words: names of moments, notes on causes, tables, what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diagkit.errors import UsageError
from diagkit.language import msg, tr, trn
from diagkit.trace.merged import Trace
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, Cause
from diagkit.views.lines import Page
from diagkit.views.scene import clean, wrap
from diagkit.views.story import Cell, Column, Story, tell
from diagkit.views.verdict import Verdict, short_call, split_runs

__all__ = [
    "Note",
    "cause_text",
    "left_out",
    "map_text",
    "moment_label",
    "moment_name",
    "notes",
    "other_ranks",
    "panel_verdict",
    "passing",
]

Names = str | Iterable[str] | None

#: More ranks than this are not compared for a figure's subtitle.
RANK_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Note:
    """A remark on one column; ``number`` marks both."""

    column: int
    number: int
    text: str
    bad: bool


def moment_name(column: Column) -> str:
    """``"save: Module.to"``, ``"after init"``, ``"before save"``."""
    return " ".join(filter(None, _moment_words(column)))


def moment_label(column: Column, room: float, size: float) -> list[str]:
    """The same on two to four lines of so many pixels."""
    head, tail = _moment_words(column)
    lines = wrap(head, room, size, 1) if head else []
    raises = " " + tr("raises")
    end = [raises.strip()] if column.failed and tail.endswith(raises) else []
    call = tail.removesuffix(raises) if end else tail
    whole = wrap(call, room, size, 2, breaks=" .")
    if any("…" in part for part in whole):
        whole = wrap(call, room, size, 2, breaks=" ._")
    return [*lines, *whole, *end]


def _moment_words(column: Column) -> tuple[str, str]:
    moment, phase = column.moment, clean(column.phase.name)
    if moment.kind == EXIT and phase:
        return tr("after"), phase
    if moment.kind == ENTER and phase:
        return tr("before"), phase
    call = clean(moment.label).removeprefix(f"{phase}: ")
    if moment.kind == CALL and moment.cause is not None:
        call = _known_call(moment.cause)
    elif moment.kind == FAILURE and moment.failure is not None:
        name = short_call(moment.failure.operation or moment.label)
        if name == phase:  # a phase that is one call has its name
            return "", f"{name} {tr('raises')}"
        call = f"{name} {tr('raises')}"
    return (f"{phase}:" if phase else "", call)


def _known_call(cause: Cause) -> str:
    public = [word for word in cause.chain if word.startswith("Module.") and "._" not in word]
    return clean(public[-1] if public else cause.operation)


def passing(story: Story) -> set[int]:
    """The shown columns whose split is no fault: it heals inside the phase where it arose, before anything fails."""
    quiet = [range(run.start, run.end + 1) for run in split_runs(story.every) if not run.lasting]
    position = {column.moment.index: i for i, column in enumerate(story.every)}
    return {c for c, column in enumerate(story.columns) if any(position[column.moment.index] in run for run in quiet)}


def notes(story: Story, verdict: Verdict, limit: int = 4) -> list[Note]:
    """What struck, column by column: causes of splits and failures first, then of other changes while there is room."""
    runs = {run.start: run for run in split_runs(story.every)}
    position = {column.moment.index: i for i, column in enumerate(story.every)}
    found: list[tuple[int, int, str, bool]] = []  # weight, column, text, bad
    failed = False
    for c, column in enumerate(story.columns):
        moment = column.moment
        run = runs.get(position[moment.index])
        if moment.failure is not None and not failed:
            failed = True
            at = f"{clean(str(moment.cause.frame))}: " if moment.cause and moment.cause.frame else ""
            found.append((0, c, f"{at}{clean(moment.failure.type)}: {clean(moment.failure.message)}", True))
        elif moment.cause is not None and run is not None:
            found.append((1 if run.lasting else 3, c, tr("cause: {text}", text=cause_text(moment.cause)), run.lasting))
        elif moment.cause is not None and column.changed:
            found.append((4, c, tr("cause: {text}", text=cause_text(moment.cause)), False))
    kept = sorted(sorted(found)[:limit], key=lambda entry: entry[1])
    return [Note(c, i, text, bad) for i, (_, c, text, bad) in enumerate(kept, 1)]


def cause_text(cause: Cause) -> str:
    """``"engine.py:41 save_checkpoint · load_model_to_device → Module.to → FSDPParam.reset_sharded_param"``."""
    where = f"{clean(str(cause.frame))} · " if cause.frame else ""
    return where + " → ".join(clean(step) for step in cause.chain or (cause.operation,))


def panel_verdict(verdict: Verdict) -> str:
    """A panel's verdict in one breath."""
    short = verdict.short[:1].upper() + verdict.short[1:]
    return tr("{what}; nothing fails.", what=short) if verdict.good else f"{short}. {verdict.sentence}"


def left_out(told: Sequence[tuple[Story, Verdict, str]], lines: Page) -> str:
    """What the figure does not show, in one sentence; empty where it shows all."""
    parts = []
    for story, _, name in told:
        if story.left_out:
            text = msg("{shown} of {count} moments of {name}") if name else msg("{shown} of {count} moments")
            parts.append(tr(text, shown=len(story.columns), count=len(story.every), name=name.lower()))
    sentence = ""
    if parts and any(_unshown_change(story) for story, _, _ in told):
        sentence = tr("Shown: {what}, those that tell most; moments= shows more.", what=", ".join(parts))
    elif parts:
        sentence = tr("Shown: {what}; the others repeat what is shown.", what=", ".join(parts))
    if lines.left_out:
        sentence += " " + tr(
            "{count} tensors have further histories; rows= shows more.", count=format(lines.left_out, ",")
        )
    return sentence.strip()


def _unshown_change(story: Story) -> bool:
    shown = {column.moment.index for column in story.columns}
    return any((c.changed or c.failed) and c.moment.index not in shown for c in story.every)


def other_ranks(trace: Trace, story: Story, phase: str | None, only: Names = None) -> str:
    """Whether the other ranks lived the same; empty for a lone rank or too many."""
    others = [rank for rank in trace if rank.rank != story.rank.rank]
    if not others:
        return ""
    if len(others) > RANK_LIMIT:
        return tr("{count} other ranks not compared", count=format(len(others), ","))
    kinds = tuple(dict.fromkeys(kind for kind, *_ in story.tensors))
    unlike: list[int] = []
    where: dict[str, None] = {}
    for rank in others:
        if phases := _differs(story, rank, phase, kinds, only):
            unlike.append(rank.rank)
            where.update(dict.fromkeys(phases))
    if not unlike:
        return trn("the other rank is alike", "the other {count} ranks are alike", len(others))
    shown = ", ".join(map(str, unlike[:6])) + (", …" if len(unlike) > 6 else "")
    places = tr(" in {phases}", phases=", ".join(where)) if all(where) else ""
    text = msg("rank {ranks} differs{places}") if len(unlike) == 1 else msg("ranks {ranks} differ{places}")
    return tr(text, ranks=shown, places=places)


def _differs(story: Story, rank: RankTrace, phase: str | None, kinds: tuple[str, ...], only: Names) -> list[str]:
    """The phases in which that rank lived otherwise at the moments that are shown; ``[""]`` where moments do not pair
    up.
    """
    if len(rank.moments) != len(story.rank.moments):
        return [""]
    try:
        shown = [column.moment.index for column in story.columns]
        other = tell(rank, phase=phase, moments=shown, kinds=kinds, only=only)
    except UsageError:
        return [""]
    if other.tensors != story.tensors:
        return [""]
    mine, theirs = ([cell and _without_index(cell) for cell in s.cells] for s in (story, other))
    pairs = set(zip(story.histories, other.histories, strict=True))
    return [
        clean(column.phase.name)
        for c, column in enumerate(story.columns)
        if any(mine[a[c]] != theirs[b[c]] for a, b in pairs)
    ]


def _without_index(cell: Cell) -> tuple[object, ...]:
    storage = cell.storage and cell.storage.partition(":")[0]
    return cell.metadata.partition(":")[0], storage, cell.pinned, cell.split, cell.apart


def map_text(title: str, around: str, told: Sequence[tuple[Story, Verdict, str]], lines: Page) -> str:
    """The text twin of a map: sentences, then one table a story."""
    out = [title]
    if len(told) == 1:
        out.append(told[0][1].sentence)
    out.append(around)
    for s, (story, verdict, name) in enumerate(told):
        out.append("")
        if name:
            out.append(f"{name}: {panel_verdict(verdict)}")
        marks = notes(story, verdict)
        number = {note.column: f" [{note.number}]" for note in marks}
        heads = ["", "", *(moment_name(column) + number.get(c, "") for c, column in enumerate(story.columns))]
        body = [
            [line.label, line.remark, *(str(cell or "-") for cell in line.histories[s] or [None] * len(story.columns))]
            for line in lines.lines
        ]
        out += table([heads, *body])
        out += [f"[{note.number}] {note.text}" for note in marks]
    if remark := left_out(told, lines):
        out += ["", remark]
    return "\n".join(out)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest entry, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
