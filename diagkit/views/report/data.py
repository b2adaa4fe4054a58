"""The report as data, for programs: the form that ``schema.json`` beside this module describes.

Facts are the same in every language; only sentences follow the language in which the report was composed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from diagkit import __version__
from diagkit.trace.schema import Cause
from diagkit.views.report.content import Report
from diagkit.views.report.failures import Told
from diagkit.views.report.timeline import Chapter

__all__ = ["FORM", "data", "json_text", "schema"]

#: Counts up when a key goes or changes its meaning; keys that are added leave it.
FORM = 1


def json_text(report: Report) -> str:
    """The report as one JSON document."""
    return json.dumps(data(report), ensure_ascii=False, indent=1) + "\n"


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of `data`."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))
    return found


def data(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    trace = report.trace
    return {
        "form": FORM,
        "diagkit": __version__,
        "language": report.language,
        "run": trace.header.run,
        "simulated": trace.simulated,
        "world_size": trace.world_size,
        "ranks": list(trace.ranks),
        "told_rank": report.told.rank,
        "title": report.title,
        "sentences": list(report.sentences),
        "good": report.good,
        "failures": [_failure(one) for one in report.failures],
        "fates": [{"ranks": list(fate.ranks), "how": fate.how, "well": fate.well} for fate in report.fates],
        "timeline": [_chapter(chapter) for chapter in report.chapters],
        "diagnosis": report.findings.to_json(),
        "tensors": _tensors(report),
        "environment": dict(report.environment),
        "header": _header(report),
        "missing": list(report.missing),
        "reproduce": {"code": report.reproduces, "script": report.script} if report.script else None,
        "fix": None if report.fix is None else asdict(report.fix),
    }


def _failure(one: Told) -> dict[str, Any]:
    return {
        "type": one.type,
        "message": one.message,
        "operation": one.operation,
        "phase": one.phase,
        "ranks": list(one.ranks),
        "seconds": round(one.seconds, 6),
        "times": one.times,
        "cause": _cause(one.cause),
    }


def _cause(cause: Cause | None) -> dict[str, Any] | None:
    return None if cause is None else asdict(cause)


def _chapter(chapter: Chapter) -> dict[str, Any]:
    return {
        "phase": chapter.name,
        "label": chapter.label,
        "seconds": round(chapter.seconds, 6),
        "lasted": None if chapter.lasted is None else round(chapter.lasted, 6),
        "outcome": chapter.outcome,
        "times": chapter.times,
        "events": [
            {
                "seconds": round(event.seconds, 6),
                "kind": event.kind,
                "what": event.what,
                "times": event.times,
                "cause": str(event.cause) if event.cause else None,
            }
            for event in chapter.events
        ],
    }


def _tensors(report: Report) -> dict[str, Any]:
    found = report.tensors
    return {
        "rank": found.rank,
        "moment": found.moment,
        "lines": [asdict(line) for line in found.lines],
        "lines_left_out": found.lines_left_out,
        "beside": found.beside,
        "ranks_compared": found.compared,
        "ranks_alike": found.alike,
        "differences": [asdict(line) for line in found.differences],
        "differences_left_out": found.differences_left_out,
    }


def _header(report: Report) -> dict[str, Any]:
    header = report.trace.header
    return {
        "torch": header.torch,
        "python": header.python,
        "device": header.device,
        "host": header.host,
        "backends": header.backends,
        "detail": header.detail,
        "argv": list(header.argv),
        "revision": header.revision,
        "job": {str(name): str(value) for name, value in header.job.items()},
    }
