"""Where the run ran: versions, devices, policies, process groups, and whether the accelerator was simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable

from diagkit.language import tr, trn
from diagkit.trace import RankTrace, Trace
from diagkit.trace.schema import EngineFacts, GroupFacts, OptimizerFacts

__all__ = ["environment"]

#: Distinct values of one kind that are written out.
SHOWN = 4


def environment(trace: Trace) -> list[tuple[str, str]]:
    """Label and value, in the order of reading; what is not known is left out."""
    header = trace.header
    ranks = list(trace)
    device = header.device_name or header.device
    facts = [fact for rank in ranks[:1] for fact in rank.facts]
    groups = [fact for fact in facts if isinstance(fact, GroupFacts) and (fact.policy or fact.parameters)]
    lines = [
        (tr("Run"), header.run),
        (tr("Began"), _began(ranks)),
        (tr("Device"), f"{header.device} ({tr('simulated')})" if trace.simulated else f"{header.device}: {device}"),
        (tr("torch"), _several(rank.header.torch for rank in ranks)),
        (tr("Python"), _several(rank.header.python for rank in ranks)),
        (tr("Ranks"), trn("{count} rank", "{count} ranks", trace.world_size)),
        (tr("Hosts"), _several(rank.header.host for rank in ranks)),
        (tr("Process group"), _several(rank.header.backends for rank in ranks)),
        (tr("Offload policy"), _several(_policy(group) for group in groups)),
        (tr("Mesh"), _several(group.mesh for group in groups)),
        (tr("FSDP groups"), _groups(ranks[0])),
        (tr("Engine"), _several(fact.type for fact in facts if isinstance(fact, EngineFacts))),
        (tr("Optimizer"), _several(fact.type for fact in facts if isinstance(fact, OptimizerFacts))),
        (tr("Code revision"), _several(rank.header.revision for rank in ranks)),
        (tr("Command"), " ".join(header.argv)),
        (tr("Job"), ", ".join(f"{name}: {value}" for name, value in list(header.job.items())[:20])),
        (tr("Detail"), header.detail),
        (tr("diagkit"), header.diagkit),
    ]
    return [(label, value) for label, value in lines if value]


def _began(ranks: list[RankTrace]) -> str:
    times = [rank.moments[0].time for rank in ranks if rank.moments and 0 < rank.moments[0].time < 1e11]
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(times))) if times else ""


def _several(values: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(value for value in values if value))
    more = trn(" and {count} more", " and {count} more", len(distinct) - SHOWN) if len(distinct) > SHOWN else ""
    return ", ".join(distinct[:SHOWN]) + more


def _policy(group: GroupFacts) -> str:
    if not group.offload:
        return tr("none")
    flags = f", {group.policy_flags}" if group.policy_flags else ""
    return f"{group.policy}(pin_memory={group.pin_memory}{flags})"


def _groups(rank: RankTrace) -> str:
    count = sum(row.kind == "fsdp_group" for row in rank.rows)
    return str(count) if count else ""
