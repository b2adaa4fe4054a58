"""What happened, in three sentences: what drove things apart, what failed first, what to do.

The rules: each sentence can be read alone; nothing is said that the trace does not hold; where nothing is wrong the
three say so, and where nobody could look they say that.
"""

from __future__ import annotations

import re

from diagkit.diagnosis import Finding, Findings
from diagkit.diagnosis.finding import ranks_text
from diagkit.diagnosis.stopped import told as stopped
from diagkit.language import tr, trn
from diagkit.trace import RankTrace, Trace
from diagkit.trace.schema import BUFFER, PARAMETER, Cause, Residency
from diagkit.trace.values import clip
from diagkit.views.report.failures import Fate, Told

__all__ = ["call_of", "moment_of", "on_ranks", "public_call", "sentences", "title"]

_FIRST_SENTENCE = re.compile(r".*?[^.\d](?:\. |。|\.$|$)", re.DOTALL)


def title(findings: Findings, failed: list[Told], ends: list[Fate]) -> str:
    """The report's heading: the hazard to blame, else the failure, else the lost ranks, else a hazard that went away,
    else that all is well."""
    first = _first(findings)
    if first is not None and (first.lasting or first.failure):
        return f"{first.code}: {first.title}"
    if failed:
        return tr("{error} in {phase}", error=failed[0].type, phase=failed[0].phase or failed[0].operation)
    if findings.blind:
        return tr("Nothing could be looked at")
    if lost := sum(len(end.ranks) for end in ends if not end.well):
        return trn("{count} rank did not end as it should", "{count} ranks did not end as they should", lost)
    if first is not None:
        return tr("{code}, gone by the end: {title}", code=first.code, title=first.title)
    return tr("No residency hazard found")


def sentences(
    trace: Trace, told: RankTrace, findings: Findings, failed: list[Told], ends: list[Fate]
) -> tuple[str, str, str]:
    """The three sentences."""
    first = _first(findings)
    if findings.blind and first is None:
        return (
            tr("Nothing could be looked at: {why}.", why=_bare(findings.blind)),
            _failed(trace, failed, ends),
            _look(),
        )
    if first is None:
        guarded = stopped(failed[0].failure) if failed else None
        remedy = guarded[1] if guarded else _nothing_found(trace, failed, ends)
        return (_calm(told, failed), _failed(trace, failed, ends), remedy)
    # The move that a failure speaks of says more than the flag that let it happen.
    moved = next((finding for finding in findings if finding.cause and finding.failure), first)
    return (_apart(moved, failed), _failed(trace, failed, ends), _remedy(first))


def _first(findings: Findings) -> Finding | None:
    return findings[0] if findings else None


def _apart(finding: Finding, failed: list[Told]) -> str:
    seen = _bare(finding.evidence[0]) if finding.evidence else finding.title
    cause = finding.cause
    if cause is None:
        return _placed(finding, seen)
    metadata, slash, storage = finding.residency.partition("/")
    if slash and storage.partition(" ")[0].partition(":")[0] != metadata.partition(":")[0]:
        done = trn(
            "split {count} tensor: its metadata says {metadata}, its bytes are {where}",
            "split {count} tensors: their metadata says {metadata}, their bytes are {where}",
            len(finding.names),
            metadata=metadata,
            where=_memory(storage),
        )
    else:
        done = tr("left this behind: {seen}", seen=seen)
    where = f"{cause.frame.function} ({cause.frame.place})" if cause.frame else tr("a line that was not recorded")
    if raised := next((one.type for one in failed if one.cause == cause and one.operation == one.phase), ""):
        return _placed(finding, tr("{where} raised {error}, which {done}", where=where, error=raised, done=done))
    call = public_call(cause)
    return _placed(finding, tr("{where} called {call}, which {done}", where=where, call=call, done=done))


def _placed(finding: Finding, what: str) -> str:
    """A sentence: in which phase, and on which ranks unless it was so on all."""
    if len(finding.ranks) < finding.world_size:
        what = tr("{ranks} alone, {what}", ranks=on_ranks(finding.ranks, finding.world_size), what=what)
    return tr("In {phase}, {what}.", phase=finding.phase, what=what) if finding.phase else _ended(what)


def _where(fact: Residency) -> str:
    if fact.split or fact.storage_device is None:
        return tr("at {place}", place=fact.short())
    return _memory(f"{fact.storage_device} pinned" if fact.pinned else fact.storage_device)


def _memory(storage: str) -> str:
    device, pinned, _ = storage.partition(" pinned")
    return tr("in pinned {device} memory", device=device) if pinned else tr("on {device}", device=device)


def public_call(cause: Cause) -> str:
    """The call of a chain that a reader knows: ``"Module.to"`` rather than what it called inside torch."""
    known = [step for step in cause.chain if step.startswith("Module.") and "._" not in step]
    return known[-1] if known else cause.operation


def call_of(finding: Finding) -> str:
    """The lines that mend it on a live model, ready to be pasted."""
    if "dk." not in finding.call:
        return finding.call
    return f"import diagkit as dk  # {tr('on every rank')}\n{finding.call}"


def moment_of(trace: Trace, finding: Finding) -> str:
    """The label of the moment at which it was judged."""
    rank = trace[finding.ranks[0]] if finding.ranks and finding.ranks[0] in trace.ranks else None
    return rank.moments[finding.moment].label if rank is not None and finding.moment < len(rank.moments) else ""


def on_ranks(ranks: tuple[int, ...], world_size: int) -> str:
    """``"on all 8 ranks"``, ``"on rank 3"``, ``"on ranks 0..2 of 8"``."""
    if len(ranks) == world_size > 1:
        return tr("on all {count} ranks", count=world_size)
    if len(ranks) == 1:
        return tr("on rank {rank}", rank=ranks[0])
    return tr("on ranks {ranks}", ranks=ranks_text(ranks, world_size))


def _failed(trace: Trace, failed: list[Told], ends: list[Fate]) -> str:
    if failed:
        first = failed[0]
        return tr(
            "The first failure, {ranks}, was {error} in {operation}: {message}",
            ranks=on_ranks(first.ranks, trace.world_size),
            error=first.type,
            operation=first.operation,
            message=_ended(clip(first.message, 300)),
        )
    bad = [end for end in ends if not end.well]
    if bad:
        ranks = on_ranks(bad[0].ranks, trace.world_size)
        return tr("No exception was seen, but {ranks} the trace {what}.", ranks=ranks, what=bad[0].how)
    return tr("No operation has failed in this trace.")


def _remedy(finding: Finding) -> str:
    found = _FIRST_SENTENCE.match(finding.remedy)
    remedy = found[0].strip() if found else finding.remedy
    if finding.lasting:
        return tr("This is {code}, still so when the trace ended. {remedy}", code=finding.code, remedy=remedy)
    return tr("This was {code}, gone by the end of the trace. {remedy}", code=finding.code, remedy=remedy)


def _calm(told: RankTrace, failed: list[Told]) -> str:
    names = list(dict.fromkeys(phase.name for phase in told.phases.values() if phase.name))
    if not told.moments:
        return tr("The run recorded nothing.")
    state = told.state(failed[0].moment if failed else -1)
    facts = [told.facts[number] for row, number in zip(told.rows, state.facts, strict=True) if row.kind in _WATCHED]
    places = sorted({_where(fact) for fact in facts if isinstance(fact, Residency) and not fact.empty})
    shown = tr(" and ").join(places[:4]) or "-"
    if not names:
        return tr("Metadata and bytes stayed together: all tensors are {places}.", places=shown)
    return tr(
        "Through {phases}, metadata and bytes stayed together: all tensors are {places}.",
        phases=", ".join(names[:6]),
        places=shown,
    )


_WATCHED = (PARAMETER, BUFFER)


def _nothing_found(trace: Trace, failed: list[Told], ends: list[Fate]) -> str:
    bad = [end for end in ends if not end.well]
    if bad and not failed:
        ranks = on_ranks(bad[0].ranks, trace.world_size)
        return tr("No residency hazard explains it: look into the job's log {ranks}, where it ends.", ranks=ranks)
    if failed:
        return tr("No residency hazard explains it: look for the cause in the message and in its own line.")
    return tr("There is nothing to mend.")


def _look() -> str:
    return tr("See what is missing, record again, and read nothing into the silence.")


def _bare(text: str) -> str:
    return text.rstrip().rstrip(".。")


def _ended(text: str) -> str:
    return text if text.endswith((".", "。", "!", "?")) else tr("{sentence}.", sentence=text)
