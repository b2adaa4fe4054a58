"""What a known engine did at each revision of its fix: measured rows, told beside a run of that engine."""

from __future__ import annotations

from typing import Any

from diagkit.demo.expected import FAILURES, expected
from diagkit.demo.experiments import REVISIONS, Experiment
from diagkit.diagnosis.predictions.facets import release
from diagkit.trace import Trace
from diagkit.trace.schema import EngineFacts, GroupFacts

__all__ = ["history"]

#: Class of an engine, wherever it comes from -> its name in the measured rows.
ENGINES = {"FSDPEngine": "fsdp", "VeOmniEngine": "veomni"}
OPERATIONS = ("save", "export", "load", "train")


def history(trace: Trace) -> list[dict[str, Any]]:
    """The cells of an outcome matrix; empty for an engine that is not known, or one without the offload policy."""
    facts = next(iter(trace)).facts
    engine = next((ENGINES.get(fact.type) for fact in facts if isinstance(fact, EngineFacts)), None)
    if engine is None or not any(isinstance(fact, GroupFacts) and fact.offload for fact in facts):
        return []
    owners = any(isinstance(fact, EngineFacts) and fact.offload_param == "True" for fact in facts)
    group = trace.header.backends if ":" in trace.header.backends else "hccl"
    torch = release(trace.header.torch)[:2]
    cells = []
    for revision in REVISIONS:
        for operation in OPERATIONS:
            row = expected(Experiment(engine, revision, operation, "both" if owners else "policy", group))
            fails = row.failure if row.shows(torch, trace.world_size) else None
            cells.append(
                {
                    "engine": engine,
                    "revision": revision,
                    "operation": operation,
                    "outcome": "crash" if fails else "ok",
                    "exception": FAILURES[fails] if fails else "",
                    "exported": row.exported or "",
                }
            )
    return cells
