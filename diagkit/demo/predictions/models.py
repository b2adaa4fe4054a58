"""The model on which predictions are measured: small, uneven over two ranks, with a buffer that forward needs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Two projections; its forward is called by `Layer`, which is what FSDP2 wraps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 5)
        self.down = nn.Linear(width + 5, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.up(x))))


class Layer(nn.Module):
    """A norm and an MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.mlp(self.norm(x)))


class Decoder(nn.Module):
    """``tokens (batch, length) -> logits (batch, length, 37)``.

    ``moves_buffers``: whether forward brings its buffer to the input's device itself, as rotary embeddings in the
    field do.
    """

    scale: Tensor

    def __init__(self, width: int = 11, layers: int = 2, moves_buffers: bool = True) -> None:
        super().__init__()
        self.moves_buffers = moves_buffers
        self.embed = nn.Embedding(37, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 37, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x * (self.scale.to(x.device) if self.moves_buffers else self.scale)
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x))
