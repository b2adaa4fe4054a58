"""A step on the simulated accelerator costs little more than the same step on the CPU, because nothing is copied."""

from __future__ import annotations

import json

import pytest
import speed_ranks
from ranks import run_ranks

# At width 64 an operator takes microseconds, and what it costs to hand it over to the host shows.
LIMITS = {(512, 32, 8): 1.15, (64, 8, 60): 1.5}


@pytest.mark.alone
@pytest.mark.parametrize(("shape", "limit"), LIMITS.items(), ids=lambda x: str(x).replace(" ", ""))
def test_a_simulated_step_costs_little_more_than_one_on_the_cpu(
    compiler: str, shape: tuple[int, int, int], limit: float
) -> None:
    (rank,) = run_ranks(speed_ranks.main, 1, args=[str(part) for part in shape])
    seconds = json.loads(rank.stdout.splitlines()[-1])
    assert seconds["npu"] <= limit * seconds["cpu"], seconds
