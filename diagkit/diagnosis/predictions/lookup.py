"""Looks a state up in the measured tables, and says on which torch a prediction was measured.

A table is one small JSON file per torch version beside this module, written by ``make predictions``. For a torch
that was not measured the nearest older table answers, else the oldest, and every answer is labelled so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from diagkit.diagnosis.finding import Consequence
from diagkit.diagnosis.predictions.facets import Facets, facets, release
from diagkit.language import msg, tr
from diagkit.trace import RankTrace
from diagkit.trace.schema import Moment

#: The operations that are measured, in the order in which they are told.
OPERATIONS = (
    "state_dict",
    "get_model_state_dict",
    "load_state_dict",
    "optimizer.load_state_dict",
    "forward",
    "backward",
    "optimizer.step",
    "clip_grad_norm_",
    "full_tensor",
    ".to(device)",
    '.to("cpu")',
    "export",
    "save",
)

#: How an error or a silent fault is told.
ERRORS: Mapping[str, str] = {
    "set_storage": msg("raises 'Attempted to set the storage of a tensor ... to a storage on different device'"),
    "materialized": msg("raises 'FSDP parameters should be materialized on CPU' (no forward has run yet)"),
    "grad_device": msg("raises 'attempting to assign a gradient with device type ...'"),
    "grad_dtype": msg("raises 'attempting to assign a gradient with dtype ...'"),
    "same_device": msg("raises 'Expected all tensors to be on the same device'"),
    "swap": msg("raises 'Couldn't swap ...'"),
    "no_backend": msg("raises 'No backend type associated with device type cpu'"),
    "param_dtype": msg("raises \"'FSDPParam' object has no attribute 'param_dtype'\", which says nothing of the cause"),
    "meta": msg("raises, because there are no bytes on meta"),
    "mixed": msg("raises 'got mixed torch.Tensor and DTensor'"),
    "stale": msg("works on old values without a word: what was written is not what is gathered"),
    "no gradient": msg("seems to work, and no gradient reaches the optimizer's parameters"),
    "nothing arrives": msg("seems to work, and no value arrives"),
    "on cpu": msg("works, but the result is on the CPU"),
    "lands apart": msg("seems to work, but leaves state on another device than its parameter: the step fails"),
    "splits": msg("seems to work, and splits metadata from bytes (DK101)"),
    "moves": msg("seems to work, and leaves the parameters on the accelerator under the policy (DK103)"),
    "no effect": msg("does nothing, without a word"),
    "drags buffers": msg("works, and drags the buffers to the CPU (DK501)"),
    "stays broken": msg("seems to work, and mends nothing"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What one operation did in one state.

    ``outcome``: "ok", "crash", "silent", "blocked" (an operation before it fails) or "depends" (on the model).
    ``error``: a key of `ERRORS`, or the exception's first words.
    """

    outcome: str
    error: str = ""

    @property
    def text(self) -> str:
        told = tr(ERRORS[self.error]) if self.error in ERRORS else self.error
        if self.error not in ERRORS and self.outcome in ("crash", "blocked"):
            told = tr("raises '{error}'", error=self.error)
        if self.outcome == "ok":
            return told or tr("works")
        if self.outcome == "blocked":
            # What its English text has in brackets tells of the pass before it, not of this operation.
            return tr("is not reached: the pass before it {fails}", fails=told.partition(" (")[0].partition("（")[0])
        if self.outcome == "depends":
            return tr("depends on the model: where forward does not move its buffers itself it {fails}", fails=told)
        return told


@dataclass(frozen=True, slots=True)
class Table:
    """The measurements on one torch version."""

    torch: str
    simulated: bool
    states: Mapping[Facets, Mapping[str, Cell]]
    names: Mapping[Facets, str]


class Prediction(dict[str, Cell]):
    """What each operation will do: operation -> `Cell`.

    ``exact``: this very state was measured; else ``state`` is the nearest that was. ``torch``: on which version.
    ``label`` is what a reader must know: "" for a state measured on the running torch.
    """

    def __init__(self, cells: Mapping[str, Cell], state: Facets, exact: bool, torch: str, label: str) -> None:
        super().__init__(cells)
        self.state = state
        self.exact = exact
        self.torch = torch
        self.label = label


@functools.cache
def tables() -> Mapping[str, Table]:
    """Every shipped table, by torch version ("2.13.0")."""
    found = {}
    for file in resources.files(__package__).iterdir():
        if file.name.startswith("torch-") and file.name.endswith(".json"):
            table = read_table(json.loads(file.read_text(encoding="utf-8")))
            found[table.torch] = table
    return found


def read_table(data: Mapping[str, Any]) -> Table:
    """A table from its JSON form."""
    states = {}
    names = {}
    for entry in data["states"]:
        key = Facets(**entry["state"])
        states[key] = {operation: Cell(*cell) for operation, cell in entry["operations"].items()}
        names[key] = entry["name"]
    return Table(data["torch"], bool(data["simulated"]), states, names)


def predict(state: Facets, torch: str = "", table: Table | None = None) -> Prediction | None:
    """What each operation will do in this state. None where nothing like it was measured (no FSDP2, no table).

    ``torch`` is the version that runs, "2.13.0+cpu"; "" takes the newest table.
    """
    label = ""
    if table is None:
        chosen, label = _table_for(torch)
        if chosen is None:
            return None
        table = chosen
    if state.policy == "no FSDP2" or not table.states:
        return None
    nearest = min(table.states, key=state.distance)
    distance = state.distance(nearest)
    if distance >= 20:
        return None
    if distance:
        label = "; ".join(
            filter(
                None,
                (
                    label,
                    tr("this very state was not measured; the nearest that was: {state}", state=table.names[nearest]),
                ),
            )
        )
    return Prediction(table.states[nearest], nearest, distance == 0, table.torch, label)


def _table_for(torch: str) -> tuple[Table | None, str]:
    known = tables()
    if not known:
        return None, ""
    order = sorted(known, key=release)
    if not torch:
        return known[order[-1]], ""
    version = torch.partition("+")[0]
    if version in known:
        return known[version], ""
    same = [v for v in order if release(v)[:2] == release(version)[:2]]
    older = [v for v in order if release(v) <= release(version)]
    chosen = (same or older or order[:1])[-1]
    return known[chosen], tr("torch {version} was not measured; measured on {other}", version=version, other=chosen)


def consequences(rank: RankTrace, moment: Moment | int = -1) -> tuple[Consequence, ...]:
    """What each operation will do in the state after a moment, for findings and tables."""
    found = predict(facets(rank, moment), rank.header.torch)
    if found is None:
        return ()
    source = found.label or tr("measured on torch {version}", version=found.torch)
    return tuple(Consequence(operation, cell.outcome, cell.text, source) for operation, cell in found.items())
