"""Training on the simulated accelerator is training on the CPU: twenty steps of real FSDP2, compared bit for bit.

The same operators give the same bits. AdamW's plain and foreach forms are the same arithmetic and so the same bits too;
its fused form rounds differently, on the CPU as on the device, and stays within 1e-5 of the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity_ranks
import pytest
from ranks import run_ranks

OPTIMIZERS = ("plain", "foreach", "fused")
OFFLOADS = ("none", "pinned", "unpinned")
PRECISIONS = ("fp32", "bf16")

Run = list[dict[str, dict[str, Any]]]  # by rank, then by variant


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request: pytest.FixtureRequest, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("parity")
    return train("cpu", request.param, ("none",), folder), train("npu", request.param, OFFLOADS, folder)


def train(device: str, ranks: int, offloads: tuple[str, ...], folder: Path) -> Run:
    choices = [",".join(names) for names in (OPTIMIZERS, offloads, PRECISIONS)]
    results = run_ranks(parity_ranks.main, ranks, args=[device, str(folder), *choices], timeout=280)
    return [json.loads(result.stdout.splitlines()[-1]) for result in results]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_optimizer_gives_the_same_bits(
    runs: tuple[Run, Run], optimizer: str, offload: str, precision: str
) -> None:
    for plain, simulated in zip(*runs, strict=True):
        assert simulated[f"{optimizer}/{offload}/{precision}"] == plain[f"{optimizer}/none/{precision}"]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_foreach_gives_the_bits_of_the_plain_loop(runs: tuple[Run, Run], offload: str) -> None:
    for plain, simulated in zip(*runs, strict=True):
        assert simulated[f"foreach/{offload}/fp32"] == plain["plain/none/fp32"]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_fused_stays_within_a_hundred_thousandth(runs: tuple[Run, Run], offload: str) -> None:
    for plain, simulated in zip(*runs, strict=True):
        fused, loop = simulated[f"fused/{offload}/fp32"], plain["plain/none/fp32"]
        assert fused["parameters"] != loop["parameters"], "if these became the same bits, say so in the docstring above"
        for ours, theirs in zip(fused["losses"] + fused["norms"], loop["losses"] + loop["norms"], strict=True):
            assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), rel=1e-5)


def test_training_learned_something_and_ranks_had_their_own_data(runs: tuple[Run, Run]) -> None:
    _, simulated = runs
    losses = [[float.fromhex(x) for x in rank["plain/pinned/fp32"]["losses"]] for rank in simulated]
    assert all(rank[-1] < 0.6 * rank[0] for rank in losses)
    assert len({tuple(rank) for rank in losses}) == len(losses)
