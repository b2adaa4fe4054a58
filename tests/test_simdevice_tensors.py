"""One process on the simulated accelerator: every check of the two case modules is a test of its own."""

from __future__ import annotations

import json

import pytest
import simdevice_cases
import simdevice_numerics  # noqa: F401  (adds its cases)
from ranks import run_ranks


@pytest.fixture(scope="module")
def outcome(compiler: str) -> dict[str, str]:
    (rank,) = run_ranks(simdevice_cases.main, 1, timeout=280)
    return json.loads(rank.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", simdevice_cases.CASES)
def test_the_simulated_device(name: str, outcome: dict[str, str]) -> None:
    assert outcome[name] == "ok", outcome[name]
