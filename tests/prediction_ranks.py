"""Does what the tables predict, on a model that they were not measured on: ``python prediction_ranks.py OUT``.

Uneven shards, a tie between embedding and head, other names, another depth, a buffer that nobody moves; 2 ranks.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diagkit.demo.predictions.bench import Kind
from diagkit.demo.predictions.cells import run_state
from diagkit.demo.predictions.forked import warm_up
from diagkit.demo.predictions.states import STATES


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.tanh(x)) * self.gain


class Tied(nn.Module):
    """Three blocks of width 13, a vocabulary of 29, one tensor for embedding and head."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(29, 13)
        self.blocks = nn.ModuleList([Block(13) for _ in range(3)])
        self.out = nn.Linear(13, 29, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("bias", torch.linspace(-1, 1, 13), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.bias
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.out.weight)


OTHER = Kind(
    make=Tied,
    parts=lambda model: list(model.get_submodule("blocks").children()),
    child=lambda model: model.get_submodule("blocks.1.mix"),
    vocab=29,
    length=5,
)


def main() -> None:
    device = warm_up()
    reality = []
    started = time.monotonic()
    for state in STATES:
        if 2 not in state.ranks:
            continue
        key, found = run_state(OTHER, state, 2, device)
        reality.append({
            "name": state.name,
            "code": state.code,
            "state": asdict(key),
            "operations": {operation: [cell.outcome, cell.error] for operation, cell in found.items()},
        })  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps({"torch": torch.__version__, "reality": reality}))
    print(f"{len(reality)} states in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
