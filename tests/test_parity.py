"""Training on the simulated accelerator is training on the CPU: twenty steps of real FSDP2, compared bit for bit.

The same operators give the same bits. AdamW's plain and foreach forms are the same arithmetic and so the same bits too;
its fused form rounds differently, on the CPU as on the device: losses stay within 1e-5 of the others, gradient norms (a
small difference of large numbers near the end) within 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity_ranks
import pytest
import torch
from ranks import run_ranks

# Two launches a world size; on a busy machine each may take its time.
pytestmark = pytest.mark.timeout(600)

OFFLOADS = ("none", "pinned", "unpinned")
PLAIN = ("plain/none/fp32", "foreach/none/fp32", "fused/none/fp32", "plain/none/bf16")
SIMULATED = (
    *(f"plain/{offload}/fp32" for offload in OFFLOADS),
    *(f"foreach/{offload}/fp32" for offload in OFFLOADS),
    "fused/none/fp32",
    "fused/pinned/fp32",
    "plain/none/bf16",
    "plain/pinned/bf16",
)

Run = list[dict[str, dict[str, Any]]]  # by rank, then by variant (optimizer/offload/precision)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    if request.param > 1 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip(
            "torch version: gloo sums before 2.9 where FSDP2 asks for the average, so the CPU's run is the wrong one"
        )
    folder = tmp_path_factory.mktemp("parity")
    return train("cpu", request.param, PLAIN, folder), train("npu", request.param, SIMULATED, folder)


def train(device: str, ranks: int, variants: tuple[str, ...], folder: Path) -> Run:
    results = run_ranks(parity_ranks.main, ranks, args=[device, str(folder), ",".join(variants)], timeout=280)
    return [json.loads(result.stdout.splitlines()[-1]) for result in results]


@pytest.mark.smoke
@pytest.mark.parametrize("variant", SIMULATED)
def test_the_same_operators_give_the_same_bits(runs: tuple[Run, Run], variant: str) -> None:
    optimizer, _, precision = variant.split("/")
    for plain, simulated in zip(*runs, strict=True):
        assert simulated[variant] == plain[f"{optimizer}/none/{precision}"]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_foreach_gives_the_bits_of_the_plain_loop(runs: tuple[Run, Run], offload: str) -> None:
    for plain, simulated in zip(*runs, strict=True):
        assert simulated[f"foreach/{offload}/fp32"] == plain["plain/none/fp32"]


@pytest.mark.parametrize("offload", ["none", "pinned"])
def test_fused_stays_within_a_hundred_thousandth(runs: tuple[Run, Run], offload: str) -> None:
    for plain, simulated in zip(*runs, strict=True):
        fused, loop = simulated[f"fused/{offload}/fp32"], plain["plain/none/fp32"]
        assert fused["parameters"] != loop["parameters"], "if these became the same bits, say so in the docstring above"
        for what, tolerance in (("losses", 1e-5), ("norms", 1e-4)):
            ours, theirs = ([float.fromhex(x) for x in run[what]] for run in (fused, loop))
            assert ours == pytest.approx(theirs, rel=tolerance), what


def test_training_learned_something_and_ranks_had_their_own_data(runs: tuple[Run, Run]) -> None:
    _, simulated = runs
    losses = [[float.fromhex(x) for x in rank["plain/pinned/fp32"]["losses"]] for rank in simulated]
    assert all(rank[-1] < 0.6 * rank[0] for rank in losses)
    assert len({tuple(rank) for rank in losses}) == len(losses)
