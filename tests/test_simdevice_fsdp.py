"""FSDP in the forms that real jobs use, on four ranks of the simulated accelerator."""

from __future__ import annotations

import json

import fsdp_ranks
import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(compiler: str) -> list[dict[str, str]]:
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in run_ranks(fsdp_ranks.main, 4, timeout=400)]


@pytest.mark.parametrize("name", fsdp_ranks.CASES)
def test_fsdp(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank in outcomes:
        assert rank[name] == "ok", rank[name]
