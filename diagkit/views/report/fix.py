"""Did the fix hold: a run with the trouble, and a run after it.

The rules: the answer is about the trouble, which is the first run's first failure and the finding to blame; what else
there is, is told beside it. A trouble that is gone proves something only where the second run came well through the
phase in which the first had it; where it did not, nobody can tell. A second run that fails in another way is no fix.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagkit.diagnosis import Finding, Findings
from diagkit.language import msg, tr, trn
from diagkit.trace import Trace
from diagkit.views.report.failures import Told, among, failures

__all__ = ["Check", "Fix", "check_fix"]

HELD, FAILS, NOT_HELD, UNKNOWN, NOTHING = "held", "fails", "not held", "cannot be told", "nothing to fix"

VERDICTS = {
    HELD: msg("The fix held: what went wrong in the first run went well in the second."),
    FAILS: msg("The second run does not show what was wrong in the first one, but it fails in another way: {failure}."),
    NOT_HELD: msg("The fix did not hold: the second run shows what the first one showed."),
    UNKNOWN: msg(
        "It cannot be told whether the fix held: the second run did not get to where the first one was wrong."
    ),
    NOTHING: msg("There was nothing to fix: the first run shows neither a hazard nor a failure."),
}
GONE, THERE, UNREACHED, NEW = "gone", "still there", "not reached", "new"
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
    """``verdict`` is a key of `VERDICTS`; ``run`` is the second run's name; ``unlike`` what makes the two unlike.

    ``checks``: the trouble first, then what was beside it, then what is new. ``failure`` is how the second run fails
    where the first did not, else "".
    """

    verdict: str
    run: str
    checks: tuple[Check, ...]
    unlike: tuple[str, ...]
    failure: str = ""

    @property
    def sentence(self) -> str:
        told = tr(VERDICTS[self.verdict], failure=self.failure)
        rest = sum(check.outcome in (THERE, NEW) for check in self.checks)
        if self.verdict != HELD or not rest:
            return told
        beside = trn(
            "Beside it {count} thing is still there or new.", "Beside it {count} things are still there or new.", rest
        )
        return tr("{first} {second}", first=told, second=beside)


def check_fix(before: Trace, found: Findings, after: Trace, left: Findings) -> Fix:
    """Compares what was wrong before with what is wrong after."""
    ended = _ended(after)
    trouble, beside = _hazards(found, left, ended)
    was, now = failures(before), failures(after)
    for told in was[:1]:
        trouble.append(_raises(told, THERE if among(now)(told) else _outcome(told.phase, ended)))
    known_before = among(was)
    failing = list(dict.fromkeys(_raises(told, NEW) for told in now if not known_before(told)))
    known = {finding.code for finding in found}
    new = [_hazard(finding, NEW) for finding in left if finding.code not in known]
    outcomes = {check.outcome for check in trouble}
    if not trouble:
        verdict = FAILS if failing else NOTHING
    elif THERE in outcomes:
        verdict = NOT_HELD
    elif failing:
        verdict = FAILS
    else:
        verdict = UNKNOWN if UNREACHED in outcomes else HELD
    return Fix(
        verdict,
        after.header.run,
        (*trouble, *beside, *new, *failing),
        tuple(_unlike(before, after)),
        failing[0].what if failing else "",
    )


def _hazards(found: Findings, left: Findings, ended: set[str]) -> tuple[list[Check], list[Check]]:
    """The finding to blame for the trouble, and the others that count."""
    codes = {finding.code for finding in left if _counts(finding)}
    checks: dict[tuple[str, str], Check] = {}
    for finding in found:
        if _counts(finding) and not finding.follows:
            outcome = THERE if finding.code in codes else _outcome(finding.phase, ended)
            checks.setdefault((finding.code, finding.phase), _hazard(finding, outcome))
    told = list(checks.values())
    return told[:1], told[1:]


def _counts(finding: Finding) -> bool:
    return bool(finding.lasting or finding.failure)


def _hazard(finding: Finding, outcome: str) -> Check:
    return Check(f"{finding.code} {finding.title}", finding.phase, outcome)


def _raises(told: Told, outcome: str) -> Check:
    what = tr("{operation} raises {error}", operation=told.operation, error=told.type)
    return Check(what, told.phase, outcome)


def _outcome(phase: str, ended: set[str]) -> str:
    return GONE if phase in ended else UNREACHED


def _ended(trace: Trace) -> set[str]:
    """Names of the phases that came to a good end on every rank that is there; "" stands for a run that did."""
    names: set[str] | None = None
    for rank in trace:
        failed = {moment.phase for moment in rank.failures}
        mine = {p.name for p in rank.phases.values() if p.ordinal and p.exit is not None and p.ordinal not in failed}
        mine |= {""} if rank.ended == "closed" and not failed else set()
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
