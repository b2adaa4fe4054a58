"""From what single ranks show to findings about a run.

The same hazard with the same cause is told once, however often it came back, and the first to blame comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from diagkit.diagnosis.across import disagreements, shared_seats
from diagkit.diagnosis.finding import Finding, Findings, ranks_text
from diagkit.diagnosis.judge import Hit, Judge
from diagkit.diagnosis.predictions import consequences
from diagkit.diagnosis.words import as_of, evidence, idle_optimizers, name_of, residency_text, resting_buffers
from diagkit.language import tr
from diagkit.trace import RankTrace, Trace
from diagkit.trace.schema import ENGINE, TENSOR_KINDS, Cause, Failure, Residency
from diagkit.trace.values import series


def diagnose(trace: Trace | RankTrace, failure: Failure | None = None) -> Findings:
    """The hazards in a trace: of all ranks, or of one (a live look is one rank's trace of one moment).

    ``failure`` is an exception that was met in the state with which the trace ends. An empty result means that no
    rule found anything; its ``blind`` says whether there was anything to look at.
    """
    ranks = [trace] if isinstance(trace, RankTrace) else list(trace)
    judge = Judge()
    hits: list[Hit] = []
    notes: dict[str, None] = {}
    for rank in ranks:
        hits += judge.rank(rank, failure)
    hits += disagreements(ranks)
    if ranks:
        notes.update(dict.fromkeys(resting_buffers(ranks[0])))
    others = dict.fromkeys(note for rank in ranks for note in idle_optimizers(rank))
    unseen = [rank for rank in ranks if not _looked_at(rank)]
    if unseen and len(unseen) < len(ranks):
        shown = ranks_text(tuple(sorted(rank.rank for rank in unseen)), len(ranks))
        others[tr("no tensor could be looked at on rank {ranks}: {why}", ranks=shown, why=_why_blind(unseen[0]))] = None
    world_size = max((rank.header.world_size for rank in ranks), default=1)
    findings = [_finding(group, world_size, failure) for group in _alike(hits)]
    findings += shared_seats(ranks, world_size)
    if any(f.code == "DK501" for f in findings):
        notes.clear()
    return Findings(
        _in_order_of_blame(findings),
        notes=[*notes, *others],
        simulated=any(rank.header.simulated for rank in ranks),
        problems=_unreadable(ranks),
        troubles=_troubles(ranks),
        blind=_why_blind(unseen[0]) if ranks and len(unseen) == len(ranks) else "",
    )


def _looked_at(rank: RankTrace) -> bool:
    """Whether the trace tells anything of any tensor."""
    return any(isinstance(facts, Residency) for facts in rank.facts) and any(r.kind in TENSOR_KINDS for r in rank.rows)


def _why_blind(rank: RankTrace) -> str:
    if rank.troubles:
        return tr("the recorder itself failed: {trouble}", trouble=rank.troubles[0])
    if rank.problems:
        return rank.problems[0]
    chosen = [f"{name} {text}" for name in ("include", "exclude") if (text := rank.header.job.get(f"diagkit.{name}"))]
    if chosen:
        return tr("no tensor is left by {filters}", filters=", ".join(chosen))
    return tr("there is no parameter and no buffer in it")


def _troubles(ranks: list[RankTrace]) -> list[str]:
    """The recorder's own faults, each once with the ranks that told of it."""
    told: dict[str, list[int]] = {}
    for rank in ranks:
        for trouble in dict.fromkeys(rank.troubles):
            told.setdefault(trouble, []).append(rank.rank)
    if len(ranks) == 1:
        return list(told)
    return [
        tr("{text} (rank {ranks})", text=trouble, ranks=ranks_text(tuple(sorted(on)), len(ranks)))
        for trouble, on in told.items()
    ]


def _alike(hits: Iterable[Hit]) -> list[list[Hit]]:
    """Hits of one hazard by one cause together, over ranks and over phases whose names differ in numbers alone."""
    groups: dict[tuple[object, ...], list[Hit]] = {}
    for hit in hits:
        phase = hit.rank.phases.get(_began_in(hit))
        named = _began_in(hit) if phase is None else series(phase.name) or phase.ordinal
        cause = _identity(hit.origin.cause if hit.origin else None)
        groups.setdefault((hit.rule.code, hit.first.model, named, cause), []).append(hit)
    return list(groups.values())


def _began_in(hit: Hit) -> int:
    """The ordinal of the phase in which it came to be so."""
    return 0 if hit.origin is None else hit.origin.phase


def _identity(cause: Cause | None) -> object:
    if cause is None:
        return None
    frame = cause.frame
    # Targets differ from hit to hit (one call per child), and so may devices in the request: the line is the culprit.
    # Folders differ from node to node, and from kernel to kernel for a notebook's cells.
    file = "" if frame is None else frame.file.rpartition("/")[2]
    return (cause.operation, None if frame is None else (file, frame.line, frame.function, frame.code))


def _finding(hits: list[Hit], world_size: int, failure: Failure | None) -> Finding:
    first = min(hits, key=lambda hit: (hit.rank.rank, hit.judged.moment.index))
    # Ranks share their tables: rows are put together as numbers, and named once.
    tables: dict[int, tuple[RankTrace, bytearray]] = {}
    for hit in hits:
        _, marked = tables.setdefault(id(hit.rank.rows), (hit.rank, bytearray(len(hit.rank.rows))))
        for start, end in hit.spans():
            marked[start:end] = b"\1" * (end - start)
    names = {
        (row, name_of(rank.rows[row])): None
        for rank, marked in tables.values()
        for row in itertools.compress(range(len(marked)), marked)
    }
    failed = next((hit.failures[0] for hit in hits if hit.failures), None)
    exception = failed.failure if failed else failure if failure and _speaks(first, failure) else None
    judged = first.judged.moment
    phase = first.rank.phases.get(judged.phase)
    severity = "now" if exception is not None else first.rule.severity
    return Finding(
        rule=first.rule,
        severity=severity,
        names=tuple(label for _, label in sorted(names)),
        residency=residency_text(first),
        ranks=tuple(sorted({hit.rank.rank for hit in hits})),
        world_size=world_size,
        phase=phase.name if phase else "",
        moment=judged.index,
        evidence=tuple(evidence(first, exception, times=len(set(map(_began_in, hits))))),
        cause=first.origin.cause if first.origin else None,
        # An engine's flags are no state in which an operation was measured.
        consequences=() if first.first.kind == ENGINE else consequences(first.rank, judged),
        lasting=any(hit.lasting for hit in hits),
        failure=f"{exception.type}: {exception.message}" if exception else "",
        model=first.first.model,
        as_of=as_of(first),
    )


def _speaks(hit: Hit, failure: Failure) -> bool:
    from diagkit.diagnosis.signatures import said

    return bool(said(failure.message).intersection(hit.rule.says))


def _in_order_of_blame(findings: list[Finding]) -> list[Finding]:
    """What came first, first; what merely follows from another finding, after it and marked so."""
    codes = {finding.code for finding in findings}
    marked = []
    for finding in findings:
        # A finding that is gone may well have left this one behind: an aborted first forward outlives its cause.
        source = next((code for code in finding.rule.follows if code in codes), "")
        marked.append(_following(finding, source) if source else finding)
    return sorted(marked, key=lambda f: (bool(f.follows), not f.failure, f.moment, f.code))


def _following(finding: Finding, source: str) -> Finding:
    from dataclasses import replace

    return replace(finding, follows=source)


def _unreadable(ranks: list[RankTrace]) -> list[str]:
    told: dict[str, None] = {}
    for rank in ranks:
        for facts in rank.facts:
            reason = getattr(facts, "unreadable", None)
            if reason:
                told[reason] = None
    return list(told)
