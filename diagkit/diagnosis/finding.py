"""What a diagnosis says: findings, and what they carry."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diagkit.diagnosis.rule import SEVERITIES, Rule
from diagkit.language import tr, trn
from diagkit.trace.patterns import compress
from diagkit.trace.schema import Cause
from diagkit.trace.spans import spans_text
from diagkit.trace.values import middle, printable

#: Findings that a text for people writes out; JSON has them all.
SHOWN = 50


@dataclass(frozen=True, slots=True)
class Consequence:
    """What one operation will do in the state that was found. ``source`` says on which torch that was measured."""

    operation: str
    outcome: str  # "ok", "crash", "silent", "blocked", "depends", "unknown"
    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.operation}: {self.text}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One hazard in one trace or live model, over all ranks that show it."""

    rule: Rule
    severity: str
    names: tuple[str, ...]  # labels of the rows concerned, in table order, over all ranks
    residency: str  # "npu:0/cpu pinned": metadata device / storage device, as the first rank has it
    ranks: tuple[int, ...]
    world_size: int
    phase: str  # name of the phase in which it was judged, "" outside any
    moment: int  # index, on the first rank of ``ranks``
    evidence: tuple[str, ...]
    cause: Cause | None = None
    consequences: tuple[Consequence, ...] = ()
    lasting: bool = True  # still so at the end of the trace
    follows: str = ""  # code of the finding that this one merely follows from
    failure: str = ""  # the exception that it explains, "RuntimeError: ..."
    model: str = "model"
    as_of: str = ""  # "as phase save began": when the consequences hold; "" for a live look, where it is now

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def title(self) -> str:
        return self.rule.title

    @property
    def mechanism(self) -> str:
        """What PyTorch does that makes it so; paragraphs with a blank line between."""
        return self.rule.text["What happens"]

    @property
    def remedy(self) -> str:
        return self.rule.text["Remedy"]

    @property
    def call(self) -> str:
        """Lines of code that mend it on a live model; "" where there are none."""
        return self.rule.text.get("Call", "").replace("\n\n", "\n")

    @property
    def references(self) -> tuple[str, ...]:
        return self.rule.references

    @property
    def detected_by(self) -> str:
        return self.rule.text["Detected by"]

    @property
    def where(self) -> tuple[str, ...]:
        """The rows concerned as patterns: ``"layers.{0..31}.mlp.up_proj.weight ×32"``."""
        return tuple(patterns(self.names))

    def to_json(self) -> dict[str, Any]:
        """Plain data, the same for every finding."""
        return {
            "code": self.code,
            "severity": self.severity,
            "title": self.title,
            "model": self.model,
            "where": list(self.where),
            "count": len(self.names),
            "residency": self.residency,
            "ranks": list(self.ranks),
            "world_size": self.world_size,
            "phase": self.phase,
            "moment": self.moment,
            "evidence": list(self.evidence),
            "cause": None if self.cause is None else _cause(self.cause),
            "failure": self.failure,
            "follows": self.follows,
            "as_of": self.as_of,
            "lasting": self.lasting,
            "consequences": [
                {"operation": c.operation, "outcome": c.outcome, "text": c.text, "source": c.source}
                for c in self.consequences
            ],
            "mechanism": self.mechanism,
            "remedy": self.remedy,
            "call": self.call,
            "references": list(self.references),
            "detected_by": self.detected_by,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int = 3) -> list[str]:
        """The finding for a terminal; ``width`` is how many patterns and consequences are written out."""
        head = f"{self.code} {self.title} [{tr(self.severity)}]"
        out = [head + ("" if self.lasting else " " + tr("(gone by the end)"))]
        if self.follows:
            out.append("  " + tr("follows from {code}: mend that first", code=self.follows))
        where = [middle(pattern, 160) for pattern in self.where]
        shown = ", ".join(where[:width]) + (
            trn(" and {count} more", " and {count} more", len(where) - width) if len(where) > width else ""
        )
        out.append(f"  {tr('where')}: {shown or '-'}" + (f" ({self.residency})" if self.residency else ""))
        phase = ", " + tr("phase {name}", name=self.phase) if self.phase else ""
        out.append(f"  {tr('ranks')}: {ranks_text(self.ranks, self.world_size)}{phase}")
        out += [f"  {tr('seen')}: {line}" for line in self.evidence]
        if self.cause is not None:
            out.append(f"  {tr('cause')}: {self.cause}")
        bad = [c for c in self.consequences if c.outcome not in ("ok", "unknown")]
        next_ = tr("next, {when}", when=self.as_of) if self.as_of else tr("next")
        out += [f"  {next_}: {c}" for c in bad[:width]]
        if len(bad) > width:
            rest = ", ".join(c.operation for c in bad[width:])
            out.append(f"  {tr('next')}: {tr('these fail or go wrong, too: {operations}', operations=rest)}")
        out.append(f"  {tr('remedy')}: {self.remedy}")
        out += [f"  {tr('call')}: {line}" for line in self.call.splitlines()]
        return [printable(line) for line in out]  # traces come from strangers


def patterns(names: Iterable[str]) -> list[str]:
    """Names as patterns, those with one suffix (``[exp_avg]``) together; characters that move a terminal's cursor are
    shown, not sent.

    >>> patterns(["l.0.w [m]", "l.1.w [m]", "l.0.w [v]"])
    ['l.{0,1}.w [m] ×2', 'l.0.w [v]']
    """
    suffixes: dict[str, list[str]] = {}
    for name in names:
        head, bracket, part = name.partition(" [")
        suffixes.setdefault(bracket + part, []).append(head)
    found = []
    for suffix, heads in suffixes.items():
        for pattern in compress(heads):
            count = f" ×{pattern.count}" if pattern.count > 1 else ""
            found.append(printable(pattern.text + suffix) + count)
    return found


class Findings(list[Finding]):
    """Findings, the first to blame first. ``notes`` are facts worth knowing that are no fault.

    ``problems`` could not be read, on this torch or because the recorder failed (``troubles``, which they include).
    ``blind`` says why no tensor at all could be looked at: then an empty list means nothing. "" where one was.
    """

    def __init__(
        self,
        findings: Iterable[Finding] = (),
        notes: Iterable[str] = (),
        simulated: bool = False,
        problems: Iterable[str] = (),
        troubles: Iterable[str] = (),
        blind: str = "",
    ) -> None:
        super().__init__(findings)
        self.notes = tuple(notes)
        self.simulated = simulated
        self.troubles = tuple(troubles)
        self.problems = (*problems, *self.troubles)
        self.blind = blind

    @property
    def codes(self) -> tuple[str, ...]:
        """Each code once, in order."""
        return tuple(dict.fromkeys(finding.code for finding in self))

    @property
    def worst(self) -> str | None:
        """The gravest severity; None without findings."""
        return max((f.severity for f in self), key=SEVERITIES.index, default=None)

    def at_least(self, severity: str) -> list[Finding]:
        """Findings of this severity or graver.

        Raises:
            ValueError: no such severity.
        """
        floor = SEVERITIES.index(severity)
        return [f for f in self if SEVERITIES.index(f.severity) >= floor]

    def to_json(self) -> dict[str, Any]:
        return {
            "simulated": self.simulated,
            "findings": [finding.to_json() for finding in self],
            "notes": list(self.notes),
            "problems": list(self.problems),
            "blind": self.blind,
        }

    def __repr__(self) -> str:
        where = " " + tr("(simulated accelerator)") if self.simulated else ""
        if not self and self.blind:
            head = printable(f"{tr('nothing could be looked at')}{where}: {self.blind}")
        elif not self:
            head = f"{tr('no residency hazard found')}{where}"
        else:
            head = f"{trn('{count} finding', '{count} findings', len(self))}{where}: {', '.join(self.codes)}"
        lines = [head]
        for finding in self[:SHOWN]:
            lines += ["", *finding.lines()]
        lines += [line for told in self.unshown() for line in ("", told)]
        lines += [f"{tr('note')}: {note}" for note in self.notes]
        lines += self._unread()
        return "\n".join(lines)

    def unshown(self) -> list[str]:
        """A line that says how many findings a text leaves out; none where it shows them all."""
        rest = len(self) - SHOWN
        told = trn("{count} further finding is in JSON only", "{count} further findings are in JSON only", rest)
        return [told] if rest > 0 else []

    def _unread(self) -> list[str]:
        torch = [problem for problem in self.problems if problem not in self.troubles]
        lines = [tr("not readable on this torch: {problem}", problem=problem) for problem in torch[:8]]
        told = [trouble for trouble in self.troubles if self or trouble not in self.blind]
        return [
            *lines,
            *(printable(tr("the recorder itself failed: {trouble}", trouble=trouble)) for trouble in told[:8]),
        ]

    def _repr_html_(self) -> str:
        head, *rest = repr(self).splitlines()[:1] or [""]
        parts = [f"<div class='diagkit-findings'><b>{html.escape(head)}</b>", *rest]
        for n, f in enumerate(self[:SHOWN]):
            where = html.escape("; ".join(middle(pattern, 160) for pattern in f.where[:3])) + (
                " …" if len(f.where) > 3 else ""
            )
            cells = [
                (tr("where"), f"<code>{where}</code> {html.escape(f.residency)}"),
                (tr("ranks"), html.escape(ranks_text(f.ranks, f.world_size))),
                *((tr("seen"), html.escape(line)) for line in f.evidence),
                *([(tr("cause"), f"<code>{html.escape(str(f.cause))}</code>")] if f.cause else []),
                *(
                    [(tr("next"), html.escape(tr("in the state {when}:", when=f.as_of)))]
                    if f.as_of and f.consequences
                    else []
                ),
                *((tr("next"), html.escape(str(c))) for c in f.consequences if c.outcome not in ("ok", "unknown")),
                (tr("remedy"), prose_html(f.remedy)),
                *(
                    [(tr("call"), f"<code>{'<br>'.join(map(html.escape, f.call.splitlines()))}</code>")]
                    if f.call
                    else []
                ),
            ]
            body = "".join(
                f"<tr><th style='text-align:left;vertical-align:top'>{k}</th><td style='text-align:left'>{v}</td></tr>"
                for k, v in cells
            )
            title = html.escape(f"{f.code} {f.title} [{tr(f.severity)}]")
            opened = "" if n else " open"
            parts.append(f"<details{opened}><summary>{title}</summary><table>{body}</table></details>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self.unshown()]
        parts += [f"<p>{tr('note')}: {html.escape(note)}</p>" for note in self.notes]
        parts += [f"<p>{html.escape(line)}</p>" for line in self._unread()]
        return "".join(parts) + "</div>"


def prose_html(text: str) -> str:
    """A text of ours as HTML: what stands in backticks is code.

    >>> prose_html("Pass `a<b`.")
    'Pass <code>a&lt;b</code>.'
    """
    parts = map(html.escape, text.split("`"))
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))


def ranks_text(ranks: tuple[int, ...], world_size: int) -> str:
    """``"all 8"``, ``"0, 1"``, ``"0..6 of 8"``.

    >>> ranks_text((0, 1, 2, 5), 8)
    '0..2, 5 of 8'
    """
    if len(ranks) == world_size:
        return tr("all {count}", count=world_size) if world_size > 1 else f"{ranks[0]}"
    return tr("{ranks} of {count}", ranks=spans_text(ranks), count=world_size)


def named_ranks(ranks: tuple[int, ...], world_size: int) -> str:
    """``"all 8 ranks"``, ``"rank 3"``, ``"ranks 0..6 of 8"``: the same within a line.

    >>> named_ranks((0, 1), 2), named_ranks((1,), 2), named_ranks((0, 1), 8)
    ('all 2 ranks', 'rank 1 of 2', 'ranks 0, 1 of 8')
    """
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    if world_size == 1:
        return "1 rank"
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks, world_size)}"


def _cause(cause: Cause) -> dict[str, Any]:
    frame = cause.frame
    return {
        "operation": cause.operation,
        "chain": list(cause.chain),
        "target": cause.target,
        "request": cause.request,
        "frame": None
        if frame is None
        else {"file": frame.file, "line": frame.line, "function": frame.function, "code": frame.code},
        "stack": [{"file": f.file, "line": f.line, "function": f.function, "code": f.code} for f in cause.stack],
    }
