"""Did the fix hold: a run with the trouble, and a run after it.

The rules: a hazard that is gone proves something only where the second run went through the phase in which the first
had it; where it did not, the answer is that nobody can tell; what is new in the second run is told as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagkit.diagnosis import Findings
from diagkit.language import msg, tr
from diagkit.trace import Trace
from diagkit.views.report.failures import failures

__all__ = ["Check", "Fix", "check_fix"]

HELD, NOT_HELD, UNKNOWN, NOTHING = "held", "not held", "cannot be told", "nothing to fix"

VERDICTS = {
    HELD: msg(
        "The fix held: what was wrong in the first run is not in the second, which went through the same phases."
    ),
    NOT_HELD: msg("The fix did not hold: the second run shows what the first one showed."),
    UNKNOWN: msg(
        "It cannot be told whether the fix held: the second run did not get to where the first one was wrong."
    ),
    NOTHING: msg("There was nothing to fix: the first run shows neither a hazard nor a failure."),
}
OUTCOMES = {
    "gone": msg("gone"),
    "still there": msg("still there"),
    "not reached": msg("not reached"),
    "new": msg("new"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was wrong in the first run, or is in the second. ``outcome`` is a key of `OUTCOMES`."""

    what: str
    phase: str
    outcome: str

    @property
    def told(self) -> str:
        return tr(OUTCOMES[self.outcome])


@dataclass(frozen=True, slots=True)
class Fix:
    """``verdict`` is a key of `VERDICTS`; ``run`` is the second run's name; ``unlike`` what makes the two unlike."""

    verdict: str
    run: str
    checks: tuple[Check, ...]
    unlike: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return tr(VERDICTS[self.verdict])


def check_fix(before: Trace, found: Findings, after: Trace, left: Findings) -> Fix:
    """Compares what was wrong before with what is wrong after."""
    ended = _ended(after)
    codes = {finding.code for finding in left if finding.lasting or finding.failure}
    checks: dict[tuple[str, str], Check] = {}
    for finding in found:
        if (finding.lasting or finding.failure) and not finding.follows:
            outcome = "still there" if finding.code in codes else _outcome(finding.phase, ended)
            what = f"{finding.code} {finding.title}"
            checks.setdefault((finding.code, finding.phase), Check(what, finding.phase, outcome))
    later = {(told.type, told.phase) for told in failures(after)}
    for told in failures(before)[:1]:
        outcome = "still there" if (told.type, told.phase) in later else _outcome(told.phase, ended)
        what = tr("{operation} raises {error}", operation=told.operation, error=told.type)
        checks[told.operation, told.phase] = Check(what, told.phase, outcome)
    outcomes = {check.outcome for check in checks.values()}
    known = {finding.code for finding in found}
    new = [
        Check(f"{finding.code} {finding.title}", finding.phase, "new") for finding in left if finding.code not in known
    ]
    phases = {told.phase for told in failures(before)}
    new += [
        Check(tr("{operation} raises {error}", operation=told.operation, error=told.type), told.phase, "new")
        for told in failures(after)
        if told.phase not in phases
    ]
    verdict = (
        NOTHING
        if not checks
        else NOT_HELD
        if "still there" in outcomes
        else UNKNOWN
        if "not reached" in outcomes
        else HELD
    )
    return Fix(verdict, after.header.run, (*checks.values(), *new), tuple(_unlike(before, after)))


def _outcome(phase: str, ended: set[str]) -> str:
    return "gone" if phase in ended else "not reached"


def _ended(trace: Trace) -> set[str]:
    """Names of the phases that came to a good end on every rank that is there; "" stands for a trace that did."""
    names: set[str] | None = None
    for rank in trace:
        failed = {moment.phase for moment in rank.failures}
        mine = {p.name for p in rank.phases.values() if p.ordinal and p.exit is not None and p.ordinal not in failed}
        mine |= {""} if rank.ended is not None else set()
        names = mine if names is None else names & mine
    return names or set()


def _unlike(before: Trace, after: Trace) -> list[str]:
    pairs = [
        (tr("world size"), before.world_size, after.world_size),
        (tr("torch"), before.header.torch, after.header.torch),
        (tr("device"), before.header.device, after.header.device),
        (tr("simulated"), before.simulated, after.simulated),
        (tr("detail"), before.header.detail, after.header.detail),
        (tr("tensors"), len(next(iter(before)).rows), len(next(iter(after)).rows)),
    ]
    return [
        tr("{what}: {first} in the first run, {second} in the second", what=what, first=one, second=two)
        for what, one, two in pairs
        if one != two
    ]
