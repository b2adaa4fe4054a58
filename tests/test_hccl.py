"""The collective backend of the simulated accelerator, in both kinds of process group that real nodes have."""

from __future__ import annotations

import json
from typing import Any

import hccl_ranks
import pytest
from ranks import run_ranks

BOTH = "cpu:gloo,npu:hccl"
ALONE = "hccl"


@pytest.fixture(scope="module", params=[BOTH, ALONE])
def group(request: pytest.FixtureRequest, compiler: str) -> tuple[str, list[dict[str, Any]]]:
    ranks = run_ranks(hccl_ranks.main, 2, args=[request.param], timeout=200)
    return request.param, [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("name", hccl_ranks.CASES)
def test_the_device_may(name: str, group: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in group[1]:
        assert rank["cases"][name] == "ok", rank["cases"][name]


def test_a_cpu_tensor_needs_a_cpu_backend(group: tuple[str, list[dict[str, Any]]]) -> None:
    backend, ranks = group
    for rank in ranks:
        if backend == BOTH:
            assert rank["cpu tensor"] == "works"
        else:
            assert "No backend type associated with device type cpu" in rank["cpu tensor"]


def test_hccl_itself_refuses_cpu_tensors(group: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in group[1]:
        assert "hccl (simulated) takes tensors of the accelerator only, got one on cpu" in rank["direct"]


def test_pytorch_chooses_hccl_for_the_device_by_itself(compiler: str) -> None:
    for rank in run_ranks(hccl_ranks.main, 2, args=[""], timeout=200):
        result = json.loads(rank.stdout.splitlines()[-1])
        assert "npu:hccl" in result["config"] and result["cases"] == {"objects_and_barriers": "ok"}
