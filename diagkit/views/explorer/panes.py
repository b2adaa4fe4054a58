"""The explorer's views as HTML: where everything is at one moment, what struck there, what is wrong at all.

Every text is escaped, for traces come from strangers; a colour never stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from diagkit.diagnosis.finding import SHOWN, named_ranks
from diagkit.trace.schema import Cause, Frame, Moment
from diagkit.views.explorer.model import Exploration, Shown
from diagkit.views.html import chip, framed, grid
from diagkit.views.scene import clean
from diagkit.views.story import Cell
from diagkit.views.words import cause_text

__all__ = ["cause_pane", "finding_title", "findings_table", "line_of", "state_pane"]

#: Frames of a stack shown, the innermost ones.
FRAMES = 12

#: Notes wrap, and a long name may too.
WRAPPING = ".dkt td:last-child{white-space:normal}.dkt tbody th{white-space:normal;overflow-wrap:anywhere}"


def state_pane(shown: Shown) -> str:
    """Where every line of tensors is; with two runs the same lines of both beside each other."""
    marks = ("A: ", "B: ") if len(shown.heads) > 1 else ("",)
    heads = ["tensors", *(f"{mark}{what}" for mark in marks for what in ("metadata", "bytes")), "notes"]
    rows = []
    for i, (line, cells) in enumerate(zip(shown.lines, shown.cells, strict=True)):
        remark = f' <span class="quiet">{escape(line.remark)}</span>' if line.remark else ""
        where = [mark[:1] for mark, cell in zip(marks, cells, strict=True) if cell is not None and cell.split]
        split = f"split in {' and '.join(where)}" if len(marks) > 1 else "split"
        notes = [f'<b class="bad">{split}</b>'] if where else []
        notes += ["runs differ"] * (i in shown.apart) + ["moved here"] * (i in shown.changed)
        notes += ["trains one tensor, gathers another"] * any(cell is not None and cell.apart for cell in cells)
        pairs = [entry for cell in cells for entry in _pair(cell)]
        rows.append([escape(line.label) + remark, *pairs, ", ".join(notes)])
    caption = " | ".join(mark + head for mark, head in zip(marks, shown.heads, strict=True))
    if shown.left_out:
        caption += f" · {shown.left_out:,} tensors in further lines: filter to see them"
    if not rows:
        return framed(f"<p>{escape(clean(caption))}</p><p>No tensor has this in its name.</p>")
    return f"<style>{WRAPPING}</style>{framed(grid(clean(caption), heads, rows))}"


def line_of(texts: Sequence[str]) -> str:
    """Texts on one line, escaped."""
    return escape(clean(" | ".join(texts)))


def _pair(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return '<span class="quiet">not there</span>', ""
    bytes_at = (cell.storage or "?") + (" · pinned" if cell.pinned else "")
    return chip(cell.metadata, cell.metadata, cell.split), chip(cell.storage, bytes_at, cell.split)


def cause_pane(moment: Moment | None, run: str = "") -> str:
    """What happened at a moment, by whose line, and the stack that led there."""
    if moment is None:
        return framed(f"<p>{escape(clean(run or 'This run'))} never got to this moment.</p>")
    parts = [f"<h4>{escape(clean(f'{run}: {moment.label}' if run else moment.label))}</h4>"]
    if moment.failure is not None:
        failure = moment.failure
        parts.append(
            f'<p class="bad">{escape(clean(f"{failure.operation} raises {failure.type}: {failure.message}"))}</p>'
        )
    if moment.cause is None:
        parts.append('<p class="quiet">Nothing was moved here by an observed call.</p>')
    else:
        parts.append(f"<p>{escape(clean(cause_text(moment.cause)))}</p>{_stack(moment.cause)}")
    return framed("".join(parts))


def _stack(cause: Cause) -> str:
    """The user's frames, outermost first; the culprit is marked."""
    frames = cause.stack[-FRAMES:]
    if not frames:
        return ""
    left_out = len(cause.stack) - len(frames)
    first = f"<li>{left_out} frames further out</li>" if left_out else ""
    items = "".join(f"<li>{_frame(frame, frame == cause.frame)}</li>" for frame in frames)
    return f'<p class="quiet">Stack outside torch, innermost last:</p><ol>{first}{items}</ol>'


def _frame(frame: Frame, culprit: bool) -> str:
    code = f"<br><code>{escape(clean(frame.code))}</code>" if frame.code else ""
    where = escape(clean(f"{frame.file}:{frame.line} in {frame.function}"))
    return f"<b>{where}</b>{code}" if culprit else f"{where}{code}"


def finding_title(exploration: Exploration, run: int, number: int) -> str:
    """``"DK101 Pinned split, phase save, all 2 ranks"``: what tells two findings of one code apart."""
    finding = exploration.findings(run)[number]
    phase = f"phase {finding.phase}, " if finding.phase else ""
    return clean(f"{finding.code} {finding.title}, {phase}{named_ranks(finding.ranks, finding.world_size)}")


def findings_table(exploration: Exploration, run: int) -> str:
    """What is wrong in a run, for a page on which nothing can be chosen."""
    rows = [
        [
            escape(finding_title(exploration, run, i)),
            escape(finding.severity),
            escape(clean("; ".join(finding.where[:3]))),
            escape(clean(cause_text(finding.cause))) if finding.cause else "",
            escape(clean(finding.remedy)),
        ]
        for i, finding in enumerate(exploration.findings(run)[:SHOWN])
    ]
    if not rows:
        return framed(f"<p>{escape(clean(exploration.names[run]))}: no residency hazard found.</p>")
    rest = "".join(f"<p>{escape(line)}</p>" for line in exploration.findings(run).unshown())
    heads = ("finding", "severity", "where", "cause", "remedy")
    return framed(grid(f"Findings of {exploration.names[run]}", heads, rows) + rest)
