"""What `heal` did, would do, or left: plain facts with a text, a page and a JSON form."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from diagkit.diagnosis.finding import Finding, patterns, prose_html
from diagkit.trace.values import printable


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of thing that was mended, or would be."""

    kind: str  # "pass", "parameters", "gradients", "optimizer state", "buffers", "lazy init"
    what: str  # "14 parameters are on the CPU again, ..."
    codes: tuple[str, ...] = ()  # the hazards that it mends
    names: tuple[str, ...] = ()  # tensors or groups that were mended, fully qualified
    problems: tuple[str, ...] = ()  # what could not be done of it, and why

    @property
    def where(self) -> tuple[str, ...]:
        """The names as patterns."""
        return tuple(patterns(self.names))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "codes": list(self.codes),
            "where": list(self.where),
            "count": len(self.names),
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class Healing:
    """The outcome of `heal`. ``left`` are the findings that are still there (in a dry run: that would be)."""

    steps: tuple[Step, ...]
    left: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    dry_run: bool = False
    simulated: bool = False
    reasons: dict[str, str] = field(default_factory=dict)  # code -> why it was left

    @property
    def codes(self) -> tuple[str, ...]:
        """The hazards that were mended, each once."""
        left = {finding.code for finding in self.left}
        return tuple(dict.fromkeys(code for step in self.steps for code in step.codes if code not in left))

    @property
    def whole(self) -> bool:
        """Whether nothing is left to mend."""
        return not self.left and not any(step.problems for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "dry_run": self.dry_run,
            "simulated": self.simulated,
            "steps": [step.to_json() for step in self.steps],
            "left": [{"code": f.code, "title": f.title, "why": self._why(f)} for f in self.left],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        lines = [self._head()]
        for step in self.steps:
            lines.append(f"  {step.what}" + (f" ({', '.join(step.codes)})" if step.codes else ""))
            lines += [f"    {_some(step.where)}"] if step.names else []
            lines += [f"    not done: {problem}" for problem in step.problems]
        if self.left:
            lines.append("left as it is:")
        for finding in self.left:
            lines += [f"  {finding.code} {finding.title}", f"    {_some(finding.where)}", f"    {self._why(finding)}"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        rows = [
            (", ".join(step.codes), step.what, [_some(step.where), *(f"not done: {p}" for p in step.problems)])
            for step in self.steps
        ]
        rows += [(f.code, f"left as it is: {f.title}", [_some(f.where), self._why(f)]) for f in self.left]
        left = "text-align:left;vertical-align:top"
        body = "".join(
            f"<tr><th style='{left}'>{html.escape(code)}</th><td style='{left}'>{html.escape(what)}<br>"
            + "<br>".join(f"<small>{prose_html(line)}</small>" for line in more)
            + "</td></tr>"
            for code, what, more in rows
        )
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        table = f"<table>{body}</table>" if rows else ""
        return f"<div class='diagkit-healing'><b>{html.escape(self._head())}</b>{table}{notes}</div>"

    def _head(self) -> str:
        where = " (simulated accelerator)" if self.simulated else ""
        if not self.steps:
            return f"nothing that can be mended{where}" if self.left else f"nothing to mend{where}"
        return f"{'would mend' if self.dry_run else 'mended'}{where}:"

    def _why(self, finding: Finding) -> str:
        return self.reasons.get(finding.code) or finding.remedy


def _some(names: tuple[str, ...], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
