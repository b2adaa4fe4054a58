"""The report as Markdown, to paste into an issue tracker.

The rules: what comes from a trace stands in code spans and code blocks, so that no name makes a heading, a link or a
mention of a person; a table for a few lines, folded blocks for the long ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from diagkit import __version__
from diagkit.diagnosis import Finding
from diagkit.diagnosis.finding import SHOWN, ranks_text
from diagkit.diagnosis.rule import MEANINGS
from diagkit.language import tr, trn
from diagkit.trace.schema import Cause
from diagkit.trace.values import clip, printable
from diagkit.views.report.content import Report
from diagkit.views.report.failures import Told
from diagkit.views.report.sentences import call_of, moment_of, on_ranks, public_call

__all__ = ["code", "markdown", "text"]

#: Lines of a table in an issue.
LINES = 30

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!])")
_MENTION = re.compile(r"@(?=\w)|(?<=\w)://")


def markdown(report: Report) -> str:
    """The whole text."""
    parts = [f"# {text(report.title)}", "", _about(report), ""]
    parts += [f"{number}. {prose(sentence)}" for number, sentence in enumerate(report.sentences, 1)]
    for section in (_fix, _first, _findings, _timeline, _tensors, _ranks, _script, _environment, _missing, _impact):
        if lines := list(section(report)):
            parts += ["", *lines]
    parts += ["", f"<sub>{tr('Made by diagkit {version}.', version=__version__)}</sub>", ""]
    return "\n".join(parts)


def text(value: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = " ".join(printable(str(value).replace("\n", " ")).split())
    escaped = _SPECIAL.sub(r"\\\1", line).replace("&", "&amp;")
    return _MENTION.sub(lambda found: found[0].replace("@", "&#64;").replace(":", "&#58;"), escaped)


def prose(value: str) -> str:
    """A text of ours: what stands in backticks is code."""
    return "".join(code(part) if n % 2 else _keep_spaces(part) for n, part in enumerate(value.split("`")))


def _keep_spaces(part: str) -> str:
    before, after = " " * part[:1].isspace(), " " * part[-1:].isspace()
    return f"{before}{text(part)}{after}" if part.strip() else before


def code(value: object, table: bool = False) -> str:
    """A code span, whatever is in it; in a table a bar would end the cell."""
    line = " ".join(printable(str(value).replace("\n", " ")).split()) or "-"
    if table:
        line = line.replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def _block(lines: str, language: str = "") -> list[str]:
    shown = "\n".join(map(printable, lines.split("\n")))
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return [f"{fence}{language}", shown.rstrip("\n"), fence]


def _folded(summary: str, lines: Iterable[str]) -> list[str]:
    return ["<details>", f"<summary>{escape(printable(summary))}</summary>", "", *lines, "", "</details>"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells are Markdown already."""
    lines = [f"| {' | '.join(map(text, heads))} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(row)} |" for row in rows[:LINES]]
    if len(rows) > LINES:
        more = trn("{count} further line is not shown.", "{count} further lines are not shown.", len(rows) - LINES)
        lines += ["", more]
    return lines


def _about(report: Report) -> str:
    header = report.trace.header
    words = [
        f"{tr('run')} {code(header.run or '?')}",
        f"torch {code(header.torch or '?')}",
        trn("{count} rank", "{count} ranks", report.trace.world_size),
        f"{code(header.device)}{' (' + tr('simulated') + ')' if report.trace.simulated else ''}",
    ]
    return " · ".join(words)


def _fix(report: Report) -> Iterator[str]:
    if report.fix is None:
        return
    yield f"## {tr('Did the fix hold?')}"
    yield f"**{text(report.fix.sentence)}**"
    yield ""
    yield from _table(
        (tr("what"), tr("phase"), tr("in the second run")),
        [(text(check.what), code(check.phase, True), text(check.told)) for check in report.fix.checks],
    )
    for line in report.fix.unlike:
        yield ""
        yield text(tr("Mind that the runs are unlike: {what}.", what=line))


def _first(report: Report) -> Iterator[str]:
    if not report.failures:
        return
    first, later = report.failures[0], report.failures[1:]
    yield f"## {tr('The first failure')}"
    yield from _block(f"{first.type}: {first.message}")
    phase = f", {tr('phase {name}', name='')}{code(first.phase)}" if first.phase else ""
    yield f"{text(on_ranks(first.ranks, report.trace.world_size))}{phase}, {code(first.operation)}{_times(first)}"
    if first.cause is not None:
        yield ""
        yield from _cause(first.cause)
    if later:
        yield ""
        summary = tr("What failed after it, and may merely follow")
        yield from _folded(summary, [_later(one, report.trace.world_size) for one in later[:LINES]])


def _later(one: Told, world_size: int) -> str:
    return f"- {code(clip(f'{one.type}: {one.message}', 200))} {text(on_ranks(one.ranks, world_size))}{_times(one)}"


def _times(one: Told) -> str:
    return f" ×{one.times}" if one.times > 1 else ""


def _cause(cause: Cause) -> Iterator[str]:
    yield " → ".join(code(step) for step in cause.chain or (cause.operation,))
    if cause.frame is not None:
        yield ""
        yield code(f"{cause.frame.file}:{cause.frame.line} {cause.frame.function}")
        if cause.frame.code:
            yield from _block(cause.frame.code, "python")


def _findings(report: Report) -> Iterator[str]:
    yield f"## {tr('Findings')}"
    if report.findings:
        told = [f"**{text(tr(severity))}**: {text(tr(MEANINGS[severity]))}" for severity in report.severities]
        yield f"{'; '.join(told)}."
        yield ""
    else:
        blind = report.findings.blind
        yield text(tr("Nothing could be looked at: {why}.", why=blind) if blind else tr("No residency hazard found."))
    for number, finding in enumerate(report.findings[:SHOWN]):
        yield from ([""] if number else [])
        yield from _finding(report, finding)
    for line in report.findings.unshown():
        yield ""
        yield text(line)
    for note in report.findings.notes:
        yield ""
        yield f"{tr('note')}: {text(note)}"


def _finding(report: Report, finding: Finding) -> Iterator[str]:
    yield f"### {finding.code} {text(finding.title)} ({text(tr(finding.severity))})"
    if finding.follows:
        yield text(tr("follows from {code}: mend that first", code=finding.follows))
        yield ""
    shown = ", ".join(map(code, finding.where[:8])) or "-"
    more = len(finding.where) - 8
    shown += trn(" and {count} more", " and {count} more", more) if more > 0 else ""
    yield f"- {tr('tensors')}: {shown}" + (f" ({code(finding.residency)})" if finding.residency else "")
    where = text(on_ranks(finding.ranks, finding.world_size))
    phase = f", {tr('phase {name}', name='')}{code(finding.phase)}" if finding.phase else ""
    moment = moment_of(report.trace, finding)
    yield f"- {tr('where')}: {where}{phase}" + (text(", " + tr("at “{moment}”", moment=moment)) if moment else "")
    for line in finding.evidence:
        yield f"- {tr('seen')}: {text(line)}"
    if finding.cause is not None:
        where = f"{code(finding.cause.frame)}: " if finding.cause.frame else ""
        yield f"- {tr('cause')}: {where}" + " → ".join(code(step) for step in finding.cause.chain)
    for one in [c for c in finding.consequences if c.outcome not in ("ok", "unknown")][:4]:
        yield f"- {tr('next')}: {code(one.operation)} {text(one.text)}"
    for heading, told in ((tr("mechanism"), finding.mechanism), (tr("remedy"), finding.remedy)):
        for number, paragraph in enumerate(told.split("\n\n")):
            yield ""
            yield f"{heading}: {prose(paragraph)}" if number == 0 else prose(paragraph)
    if finding.call:
        yield from _block(call_of(finding), "python")


def _timeline(report: Report) -> Iterator[str]:
    yield f"## {tr('Timeline')}"
    rows = []
    for chapter in report.chapters:
        times = f" ×{chapter.times}" if chapter.times > 1 else ""
        outcome = {"ok": tr("ends well"), "failed": tr("fails"), "open": tr("never ended")}[chapter.outcome]
        name = code(chapter.name, True) if chapter.name else text(tr("outside any phase"))
        if chapter.ordinal:
            rows.append((f"{chapter.seconds:.3f}", name + times, text(outcome), code(chapter.label, True)))
        for event in chapter.events:
            where = code(f"{event.cause.frame or ''} {public_call(event.cause)}", True) if event.cause else "-"
            rows.append(
                (
                    f"{event.seconds:.3f}",
                    name,
                    text(event.what) + (f" ×{event.times}" if event.times > 1 else ""),
                    where,
                )
            )
    yield from _table((tr("seconds"), tr("phase"), tr("what happened"), tr("whose line")), rows)


def _tensors(report: Report) -> Iterator[str]:
    found = report.tensors
    yield f"## {tr('Where the tensors are')}"
    yield text(tr("Rank {rank} at “{moment}”", rank=found.rank, moment=found.moment))
    yield ""
    rows = [
        (
            code(line.name, True),
            code(line.metadata_device, True),
            code((line.storage_device or "?") + (" pinned" if line.pinned else ""), True),
            text(", ".join([tr("split")] * line.split + list(line.notes)) or "-"),
        )
        for line in found.lines
    ]
    yield from _table((tr("tensors"), tr("metadata says"), tr("bytes are on"), tr("notes")), rows)


def _ranks(report: Report) -> Iterator[str]:
    world = report.trace.world_size
    if world == 1:
        return
    yield f"## {tr('The ranks')}"
    yield from _table(
        (tr("ranks"), tr("how it ended")),
        [(_which(fate.ranks, world), text(fate.how)) for fate in report.fates],
    )
    if report.tensors.differences:
        yield ""
        yield from _table(
            (tr("tensors"), tr("rank {rank}", rank=report.tensors.beside), tr("they"), tr("which ranks")),
            [
                (code(line.pattern, True), code(line.here), code(line.there), _which(line.ranks, world))
                for line in report.tensors.differences
            ],
        )


def _which(ranks: tuple[int, ...], world_size: int) -> str:
    return text(clip(ranks_text(ranks, world_size), 80))


def _script(report: Report) -> Iterator[str]:
    if report.script:
        yield f"## {tr('Reproduce it')}"
        yield from _folded("reproduce.py", _block(report.script, "python"))


def _environment(report: Report) -> Iterator[str]:
    yield f"## {tr('Environment')}"
    yield from (f"- {text(name)}: {code(clip(value, 300))}" for name, value in report.environment)


def _missing(report: Report) -> Iterator[str]:
    yield f"## {tr('What is missing')}"
    yield from [f"- {text(line)}" for line in report.missing[:LINES]] or [tr("Nothing: every rank's trace is whole.")]


def _impact(report: Report) -> Iterator[str]:
    yield f"## {tr('Impact and actions')}"
    yield f"{tr('Impact')}: …"
    yield ""
    yield from _table((tr("what"), tr("who"), tr("until when")), [(" ", " ", " ")] * 2)
