"""Set the lab's cell beside verl's and name what differs.

Compared: the outcome and its exception, where every parameter and buffer rests after the initialisation, inside the
operation and after it (or at its failure), whether storages were exchanged, where exported tensors are, whether
values are right. Counts are not compared, the two models differ; what is compared is the set of places.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from realengines.cells import RELEASES, Cell

Facts = dict[str, str]
DemoCell = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class KnownDifference:
    """A difference that is there for a reason: in which cells and facts, what each side says, and why."""

    engine: str
    releases: tuple[str, ...]
    offloads: tuple[str, ...]
    facts: tuple[str, ...]
    real: str
    lab: str
    reason: str

    def covers(self, cell: Cell, fact: str, real: str, lab: str) -> bool:
        """Say whether this explains that the real engine says ``real`` in ``cell`` where the lab's says ``lab``."""
        return (
            cell.engine == self.engine
            and cell.release in self.releases
            and cell.offload in self.offloads
            and fact in self.facts
            and (real, lab) == (self.real, self.lab)
        )


@dataclass(frozen=True)
class Difference:
    """One fact on which the real engine and the lab's disagree."""

    cell: Cell
    fact: str
    real: str
    lab: str
    known: KnownDifference | None


def _places(counts: Mapping[str, int]) -> str:
    return " + ".join(sorted(counts)) or "none"


def facts_of(reports: Iterable[Mapping[str, Any]]) -> Facts:
    """Reduce the reports of a cell's ranks to comparable words; where ranks disagree, all their words are given."""
    ranks = [_facts_of_rank(report) for report in reports]
    names = sorted({name for facts in ranks for name in facts})
    return {name: " | ".join(sorted({facts.get(name, "-") for facts in ranks})) for name in names}


def _facts_of_rank(report: Mapping[str, Any]) -> Facts:
    facts = {"outcome": outcome(report)}
    for moment in ("init", "inside", "end", "failure"):
        for kind, counts in report["residency"].get(moment, {}).items():
            facts[f"{kind}, {moment}"] = _places(counts)
    if "storages_exchanged" in report:
        exchanged, of = report["storages_exchanged"].split("/")
        facts["storages exchanged"] = {"0": "none", of: "all"}.get(exchanged, "some")
    if "exported" in report:
        facts["exported to"] = _places(report["exported"])
        facts["exported as"] = _places(report["dtypes"])
    for name in ("values_equal", "every_weight_changed", "files"):
        if name in report:
            facts[name.replace("_", " ")] = str(report[name])
    return facts


def demo_cell(cell: Cell) -> DemoCell:
    """Name a real cell's counterpart as ``diagkit demo --json`` does: engine, revision, operation, flags, group."""
    return (cell.engine, RELEASES[cell.release], cell.operation, cell.offload, cell.groups)


def facts_of_demo(entry: Mapping[str, Any]) -> Facts:
    """Reduce one cell of ``diagkit demo --json`` to the same words, as far as it has them."""
    error = entry["exception"]
    facts = {"outcome": f"{error['type']} in {entry['operation']}: {_cause(error['message'])}" if error else "ok"}
    # The demo's "failure" is the moment of the exception; ours, like its "end", is after everything was unwound.
    moments = {"init": "rest", "inside": "failure", "failure": "end"} if error else {"init": "rest", "end": "end"}
    for moment, name in moments.items():
        for kind, counts in entry["residency"][name].items():
            # The demo names the device with its index, "npu:0/cpu pinned".
            facts[f"{kind}, {moment}"] = _places({re.sub(r":\d+", "", place): count for place, count in counts.items()})
    if entry["exported"]:
        facts["exported to"] = entry["exported"] if isinstance(entry["exported"], str) else _places(entry["exported"])
    return facts


def outcome(report: Mapping[str, Any]) -> str:
    """Put one rank's end in words: ``ok``, or where it failed and with which exception."""
    if report["outcome"] == "error":
        error = report["exception"]
        text = error["message"].strip().splitlines()[0] if error["message"].strip() else ""
        return f"{error['type']} in {report['stage']}: {_cause(text)}"
    return str(report["outcome"])


# The texts by which torch says what stopped it. Anything else is compared word for word.
_CAUSES = {
    "Attempted to set the storage of a tensor": "Attempted to set the storage",
    "No backend type associated with device type cpu": "No backend type associated with device type cpu",
    "FSDP parameters should be materialized on CPU": "parameters should be materialized on CPU",
}


def _cause(text: str) -> str:
    return next((short for long, short in _CAUSES.items() if long in text), text)


def differences(cell: Cell, real: Facts, lab: Facts, known: Iterable[KnownDifference]) -> list[Difference]:
    """List every fact on which the two disagree, each with the known reason for it, or none."""
    known = list(known)
    found = []
    for fact in sorted({*real, *lab}):
        left, right = real.get(fact, "-"), lab.get(fact, "-")
        if left != right:
            reason = next((difference for difference in known if difference.covers(cell, fact, left, right)), None)
            found.append(Difference(cell, fact, left, right, reason))
    return found


def table(rows: Iterable[tuple[Cell, Facts, Facts, list[Difference]]]) -> str:
    """Lay the comparison out for people: a line for each cell, then each difference with its reason."""
    lines = [f"{'real engine, first operation':44}{'verl':58}{'lab':6}{'parameters at rest > inside > after'}"]
    named: Counter[KnownDifference] = Counter()
    for cell, real, _, found in rows:
        unknown = [difference for difference in found if difference.known is None]
        verdict = "DIFFERS" if unknown else "named" if found else "same"
        moments = ("init", "inside", "end", "failure")
        where = " > ".join(real[f"parameters, {moment}"] for moment in moments if f"parameters, {moment}" in real)
        groups = "" if "gloo" in cell.groups else " (hccl alone)"
        what = f"{cell.release} {cell.engine} {cell.offload} {cell.ranks}x {cell.operation}{groups}"
        lines.append(f"{what:44}{real['outcome'][:56]:58}{verdict:8}{where}")
        for difference in unknown:
            lines.append(f"    {difference.fact}: verl {difference.real!r}, lab {difference.lab!r}")
        named.update({difference.known for difference in found if difference.known is not None})
    if named:
        lines += ["", "Named differences:"]
    for known, count in named.items():
        where = f"{known.engine} engine of {', '.join(known.releases)}, {count} cells"
        lines.append(f"  {where}: verl {known.real}, lab {known.lab}. {known.reason}")
    return "\n".join(lines)
