"""What an exception means: the hazard behind it where there is one, and plainly "not this" where there is none.

A message alone is never a diagnosis. With facts (a live model), the rules that hold and explain the message answer.
Without (a log), the candidates are listed in the order of likelihood, beside what would settle it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diagkit.diagnosis.finding import Finding, Findings
from diagkit.diagnosis.operation import PROVEN, likely, ordered
from diagkit.diagnosis.rule import Rule, find_rules
from diagkit.diagnosis.signatures import said
from diagkit.diagnosis.stopped import told
from diagkit.language import msg, tr
from diagkit.trace.schema import Failure
from diagkit.trace.values import printable

NOT_OURS = msg("not an FSDP2 residency problem")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to one exception. ``code`` is None where no residency hazard stands behind it."""

    error: str  # "RuntimeError: ..."
    operation: str = ""  # what was under way, "" where it cannot be told
    findings: tuple[Finding, ...] = ()  # shown by facts, the first to blame first
    candidates: tuple[Rule, ...] = ()  # by text alone, the likeliest first
    beside: tuple[Finding, ...] = ()  # hazards that are there, but do not explain this exception
    rank: int | None = None
    where: str = ""  # the user's line, "train.py:41 save"
    earlier: str = ""  # the first error, where this one only follows from it
    next: tuple[str, ...] = ()  # what to record to be sure
    stopped: tuple[str, str] | None = None  # code and sentence where a guard stopped the hazard before it happened
    notes: tuple[str, ...] = field(default=())
    simulated: bool = False  # the model that was looked at is on the simulated accelerator

    @property
    def code(self) -> str | None:
        """The hazard to blame; by facts if there are any, else the likeliest candidate."""
        if self.findings:
            return self.findings[0].code
        if self.stopped:
            return self.stopped[0]
        return self.candidates[0].code if self.candidates else None

    @property
    def certain(self) -> bool:
        """Whether facts speak, and not the text alone; a guard that stopped something had looked at them."""
        return bool(self.findings or self.stopped)

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "certain": self.certain,
            "simulated": self.simulated,
            "error": self.error,
            "operation": self.operation,
            "rank": self.rank,
            "where": self.where,
            "earlier": self.earlier,
            "findings": [f.to_json() for f in self.findings],
            "candidates": [{"code": r.code, "title": r.title} for r in self.candidates],
            "beside": [f.code for f in self.beside],
            "next": list(self.next),
            "stopped": self.stopped[1] if self.stopped else "",
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        lines = [self.error]
        at = [
            tr("rank {rank}", rank=self.rank) if self.rank is not None else "",
            tr("during {operation}", operation=self.operation) if self.operation else "",
            self.where,
        ]
        where = [", ".join(filter(None, at)), tr("(simulated accelerator)") if self.simulated else ""]
        if any(where):
            lines.append("  " + " ".join(filter(None, where)))
        if self.earlier:
            lines.append("  " + tr("the first error, which this one follows from: {error}", error=self.earlier))
        if self.findings:
            for finding in self.findings:
                lines += ["", *finding.lines()]
        elif self.stopped:
            lines += ["", self.stopped[1]]
        elif self.candidates:
            lines += ["", tr("The text alone fits, the likeliest first:")]
            lines += [f"  {r.code}  {r.title}" for r in self.candidates]
            first = self.candidates[0]
            lines += ["", tr("If it is {code}: {remedy}", code=first.code, remedy=first.text["Remedy"])]
        else:
            lines += ["", tr(NOT_OURS)]
            lines += ["  " + tr("beside it there is {code} {title}", code=f.code, title=f.title) for f in self.beside]
        if self.next:
            lines += ["", tr("To be sure:"), *(f"  {step}" for step in self.next)]
        lines += [f"{tr('note')}: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        if not self.findings:
            return f"<pre>{html.escape(repr(self))}</pre>"
        head = f"<p><code>{html.escape(self.error)}</code><br>{html.escape(self.where)}</p>"
        first = f"<p>{html.escape(tr('the first error: {error}', error=self.earlier))}</p>" if self.earlier else ""
        return f"<div>{head}{first}{Findings(self.findings, simulated=self.simulated)._repr_html_()}</div>"


def by_facts(
    failure: Failure, findings: Sequence[Finding], operation: str, *, earlier: Failure | None = None, where: str = ""
) -> Explanation:
    """The explanation of an exception beside the findings of the state in which it was met.

    A finding explains it when its rule knows the text. ``earlier`` is the exception that came first, where this one was
    raised on top of it.
    """
    names = said(failure.message)
    possible = (*likely(names, operation), *PROVEN)
    explains = [f for f in findings if names.intersection(f.rule.says) and f.code in possible]
    order = ordered([f.code for f in explains], names, operation)
    # An engine that moves what the policy owns is the cause of the split that its move makes; and a gradient or a
    # moment that only looks stranded because its parameter was exchanged is not to blame.
    exchanged = {f.code for f in explains} & {"DK102", "DK103a", "DK103b"}
    explains.sort(key=lambda f: (f.rule.family != "engine", bool(exchanged & {f.follows}), order.index(f.code)))
    if explains and explains[0].code == "DK601":
        # The retry's error follows from what made the first forward fail; where that is still there, it is to blame.
        explains = [*(f for f in findings if f.code in explains[0].rule.follows), *explains]
    beside = tuple(f for f in findings if f not in explains)
    return Explanation(
        error=_error(failure),
        operation=operation,
        findings=tuple(explains),
        beside=beside,
        where=where,
        earlier=_error(earlier) if earlier is not None else "",
        stopped=told(failure),
        simulated=isinstance(findings, Findings) and findings.simulated,
        notes=()
        if explains or not names
        else (tr("the text is known ({names}), but no fact supports it", names=", ".join(sorted(names))),),
    )


def by_text(
    failure: Failure, operation: str, *, rank: int | None = None, where: str = "", earlier: Failure | None = None
) -> Explanation:
    """The explanation of an exception of which only the text and the stack are known."""
    names = said(failure.message)
    candidates = [rule for code in likely(names, operation) for rule in find_rules(code)]
    steps: tuple[str, ...] = ()
    if candidates:
        steps = (
            tr(
                "record the run: diagkit run --out runs/a SCRIPT ARGS, or dk.record(model, optimizer, out=...) in "
                "code; then diagkit diagnose runs/a"
            ),
            tr("or, where the process still lives: dk.explain() in the except block, or dk.inspect(model, optimizer)"),
        )
    return Explanation(
        error=_error(failure),
        operation=operation,
        candidates=tuple(candidates),
        rank=rank,
        where=where,
        earlier=_error(earlier) if earlier is not None else "",
        next=steps,
        stopped=told(failure),
    )


def _error(failure: Failure) -> str:
    return f"{failure.type}: {' '.join(failure.message.split())[:300]}"
