"""What the next operation does on a split parameter, row by row as the field knows it, on the simulated device."""

from __future__ import annotations

import json

import pytest
import split_ranks
import torch
from ranks import run_ranks

CRASH = (
    'RuntimeError: Attempted to set the storage of a tensor on device "cpu" '
    'to a storage on different device "npu:{rank}"'
)
MIXED = "Expected all tensors to be on the same device, but found at least two devices, npu:{rank} and cpu!"

# The row, and how its outcome begins or what it contains ({rank} stands for the rank's device index).
TABLE = {
    "split": "ok: dtensor npu/cpu, pinned True",
    "state_dict": CRASH,
    "get_model_state_dict": CRASH,
    "detach": CRASH,
    "data": CRASH,
    "view": CRASH,
    "t": CRASH,
    "Parameter": CRASH,
    "first forward": "FSDP parameters should be materialized on CPU",
    "later forward": "ok: equal True",
    "backward after lazy init": "RuntimeError: attempting to assign a gradient with device type 'cpu'",
    "step with travelled grads": "RuntimeError: " + MIXED,
    "second move": "RuntimeError: _apply(): Couldn't swap",
    "p.to": "ok: same object True, local cpu, full cpu",
    "full_tensor": "ok: tensor cpu",
    "redistribute": "ok: dtensor cpu/cpu",
    "to_local": "ok: tensor cpu",
    "clone": "ok: dtensor cpu/cpu",
    "p + 1": "ok: dtensor cpu/cpu",
    "p.cpu then export": "ok: npu, right True",
    "state_dict keep_vars": "ok: 6 entries",
    "in-place": "ok: done",
    "deepcopy": "ok: dtensor cpu/cpu",
    "is_pinned": "ok: True",
    "repr": "ok: True",
    "torch.save": "ok: saved",
    "model.load_state_dict": "ok: values arrive True",
    "optimizer.load_state_dict": "ok: moments npu, step after a heal: " + MIXED,
    "zeros_like": "ok: dtensor cpu/cpu",
    "storage device": "ok: npu/cpu",
}

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Split or not: DTensor does not know the operator yet.
if RELEASE < (2, 12):
    TABLE["is_pinned"] = "NotImplementedError: Operator aten.is_pinned.default"
# Before 2.9 nothing compares the devices, and the split is silent.
if RELEASE < (2, 9):
    SILENT = dict.fromkeys(("detach", "data", "view", "t", "Parameter"), "ok: dtensor cpu/cpu")
    TABLE |= SILENT | {"state_dict": "ok: ", "get_model_state_dict": "ok: ", "second move": "ok: None"}


@pytest.fixture(scope="module")
def outcomes(compiler: str) -> list[dict[str, str]]:
    ranks = run_ranks(split_ranks.main, 2, timeout=280)
    return [json.loads(rank.stdout.splitlines()[-1])["rows"] for rank in ranks]


@pytest.mark.smoke
@pytest.mark.parametrize("row", TABLE)
def test_on_a_split_parameter(row: str, outcomes: list[dict[str, str]]) -> None:
    for rank, rows in enumerate(outcomes):
        assert TABLE[row].format(rank=rank) in rows[row]


@pytest.mark.smoke
def test_a_split_first_forward_poisons_lazy_initialisation(outcomes: list[dict[str, str]]) -> None:
    for rows in outcomes:
        assert "after a heal: 'FSDPParam' object has no attribute" in rows["first forward"]


def test_every_row_of_the_experiment_is_in_the_table() -> None:
    assert set(TABLE) == set(split_ranks.ROWS)
