"""The opt-in probe reads values at the edges of phases, where somebody asked for it, and changes nothing."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import diagkit as dk
from diagkit.capture.values import LIMIT, digest
from diagkit.errors import UsageError
from diagkit.trace import RankTrace, open_trace
from diagkit.trace.schema import BUFFER, PARAMETER, Residency


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))


def told(rank: RankTrace, kind: str) -> list[list[str | None]]:
    """The digests of each row of a kind, moment by moment."""
    rows = [row.id for row in rank.rows if row.kind == kind]
    found: list[list[str | None]] = []
    for moment in rank.moments:
        facts = [rank.facts[number] for number in map(rank.state(moment).facts.__getitem__, rows)]
        found.append([f.digest for f in facts if isinstance(f, Residency)])
    return found


def test_equal_values_have_equal_digests_and_others_have_not() -> None:
    ones = torch.ones(2, 3)
    assert digest(ones) == digest(torch.ones(2, 3)) != digest(torch.zeros(2, 3))
    assert digest(ones) not in (digest(torch.ones(3, 2)), digest(torch.ones(2, 3, dtype=torch.int32)))
    grid = torch.arange(6.0).reshape(2, 3)
    assert digest(grid.t()) == digest(grid.t().contiguous()) != digest(grid.reshape(3, 2))


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.empty(0), torch.eye(2).to_sparse(), torch.empty(LIMIT + 1, dtype=torch.int8)],
    ids=["meta", "empty", "sparse", "large"],
)
def test_what_has_no_bytes_or_too_many_has_no_digest(tensor: torch.Tensor) -> None:
    assert digest(tensor) is None


def freed(tensor: torch.Tensor, size: int = 0) -> torch.Tensor:
    """The tensor, whose storage keeps this many bytes alone."""
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        freed(torch.ones(512, 512)),
        freed(torch.ones(512, 512).t()),
        freed(torch.ones(512, 512)[256:]),
        freed(torch.ones(512, 512), 512 * 512 * 4 - 1),
        freed(torch.ones(1).expand(512, 512)),
        freed(torch.ones(512, 512)[256:], 512 * 512 * 2),
    ],
    ids=["whole", "transposed", "part", "one byte short", "expanded", "the other half is left"],
)
def test_a_tensor_whose_storage_was_freed_has_no_digest(tensor: torch.Tensor) -> None:
    assert digest(tensor) is None


def test_what_its_storage_still_holds_has_a_digest() -> None:
    half = freed(torch.ones(4, 4)[:2], 2 * 4 * 4)
    assert digest(half) == digest(torch.ones(2, 4)) == digest(torch.ones(1).expand(2, 4))


def test_a_job_that_frees_and_refills_its_weights_is_recorded(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(256, 256)
    storage, kept = model.weight.untyped_storage(), model.weight.detach().clone()
    with dk.record(model, out=tmp_path, values=("parameters",)) as rec:
        with rec.phase("sleep"):
            storage.resize_(0)
        with rec.phase("wake"):
            storage.resize_(kept.nbytes)
            model.weight.data.copy_(kept)
    rank = open_trace(tmp_path)[0]
    digests = [rank.facts[rank.state(moment).facts[0]].digest for moment in rank.moments]  # type: ignore[union-attr]
    assert [digest is None for digest in digests] == [False, False, True, True, False, False]
    assert digests[0] == digests[-1]


def test_reading_changes_nothing() -> None:
    tensor = torch.randn(4, 4, requires_grad=True)
    lazy = torch._lazy_clone(tensor.detach())
    before = (tensor._version, tensor.untyped_storage()._cdata, tensor.grad_fn)
    assert digest(tensor) == digest(lazy)
    assert (tensor._version, tensor.untyped_storage()._cdata, tensor.grad_fn) == before
    assert torch._C._is_cow_tensor(lazy)  # still not a copy of its own


def test_values_are_told_at_the_edges_of_phases_only(tmp_path: pathlib.Path) -> None:
    model = Scaled()
    with dk.record(model, out=tmp_path, values=("buffers",)) as rec:
        with rec.phase("train"):
            with torch.no_grad():
                model.get_buffer("scale").mul_(2)
            model.float()  # a moment inside
        model.get_buffer("scale").mul_(2)
    rank = open_trace(tmp_path)[0]
    ((start,), (enter,), (inside,), (exit_,), (end,)) = told(rank, BUFFER)
    assert [m.label for m in rank.moments] == ["start", "train: enter", "Module.float", "train: exit", "end"]
    assert start == enter == inside != exit_ != end and start is not None
    assert all(value is None for values in told(rank, PARAMETER) for value in values)


def test_nobody_reads_values_unasked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(tensor: torch.Tensor) -> bytes:
        raise AssertionError("values were read")

    monkeypatch.setattr("diagkit.capture.readings.digest", never)
    with dk.record(Scaled(), out=tmp_path, detail="full") as rec, rec.phase("train"):
        pass
    assert open_trace(tmp_path)[0].troubles == []


def test_an_unknown_kind_of_values_is_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    with (
        pytest.raises(UsageError, match=r"found gradients, expected buffers, parameters"),
        dk.record(Scaled(), out=tmp_path, values=("gradients",)),
    ):
        pass
