"""What a report says, as data: composed once, and told by the page, the Markdown and the JSON alike."""

from __future__ import annotations

from dataclasses import dataclass

from diagkit.diagnosis import Findings
from diagkit.diagnosis.rule import SEVERITIES
from diagkit.language import chosen
from diagkit.trace import RankTrace, Trace
from diagkit.trace.values import printable
from diagkit.views.report.environment import environment
from diagkit.views.report.failures import Fate, Told, failures, fates, told_rank
from diagkit.views.report.fix import Fix, check_fix
from diagkit.views.report.reproduce import script
from diagkit.views.report.sentences import sentences, title
from diagkit.views.report.tensors import Tensors, tensors
from diagkit.views.report.timeline import Chapter, timeline

__all__ = ["Report", "compose"]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is told, in the order of reading; texts are in the language in which it was composed."""

    trace: Trace
    told: RankTrace  # whose story the timeline and the tensors tell
    language: str
    title: str
    sentences: tuple[str, str, str]
    good: bool
    failures: tuple[Told, ...]  # the first one first
    fates: tuple[Fate, ...]
    chapters: tuple[Chapter, ...]
    findings: Findings
    tensors: Tensors
    environment: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    reproduces: str  # code of the hazard that the script brings about
    script: str
    against: Trace | None = None
    fix: Fix | None = None

    @property
    def severities(self) -> tuple[str, ...]:
        """Those of the findings, the gravest first."""
        found = {finding.severity for finding in self.findings}
        return tuple(severity for severity in reversed(SEVERITIES) if severity in found)

    @property
    def alarming(self) -> bool:
        """Something failed, will fail or trains wrongly, or nobody could look; not what only costs memory or time."""
        grave = self.findings.blind or self.findings.at_least("later")
        return bool(grave or self.failures or not all(fate.well for fate in self.fates))


def compose(trace: Trace, against: Trace | None = None) -> Report:
    """The report on a run, in the language chosen now; ``against`` is a later run, after a fix."""
    findings = trace.findings()
    failed = failures(trace)
    told = told_rank(trace, failed, findings)
    ends = fates(trace)
    code, source = script(findings, trace)
    return Report(
        trace=trace,
        told=told,
        language=chosen(),
        title=title(findings, failed, ends),
        sentences=sentences(trace, told, findings, failed, ends),
        good=not findings and not failed and not findings.blind and all(end.well for end in ends),
        failures=tuple(failed),
        fates=tuple(ends),
        chapters=tuple(timeline(told)),
        findings=findings,
        tensors=tensors(trace, told, failed[0].moment if failed else None),
        environment=tuple(environment(trace)),
        missing=tuple(map(printable, [*trace.problems, *findings.problems])),
        reproduces=code,
        script=source,
        against=against,
        fix=check_fix(trace, findings, against, against.findings()) if against is not None else None,
    )
