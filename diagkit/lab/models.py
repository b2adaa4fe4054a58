"""A decoder small enough to print, with the names that people see in real checkpoints.

Rules of this module: parameter names follow the Hugging Face layout of a Llama- or Qwen-like model, so that a
residency table from the lab reads like one from a training job; the rotary buffer is non-persistent, because that is
the buffer which no checkpoint brings back; sizes are arguments, and the default ones do not divide evenly by two, so
that padded shards are the rule and not a special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DecoderConfig", "TinyDecoder", "source_weights"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a :class:`TinyDecoder`, in elements.

    ``tie`` shares one tensor between embedding and head; ``lora_rank > 0`` freezes the base weights and adds a
    low-rank adapter to every query projection (what decides verl's export since #7005 is whether one exists).

    >>> DecoderConfig(hidden=16, heads=2).head_dim
    8
    """

    vocab: int = 37
    hidden: int = 16
    intermediate: int = 22
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    tie: bool = False
    lora_rank: int = 0

    @property
    def head_dim(self) -> int:
        """Elements per attention head; even, because rotary embedding turns pairs."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class LoraLinear(nn.Linear):
    """A frozen projection with a trained low-rank adapter beside it."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + cast(Tensor, self.lora_B(self.lora_A(x)))


class RotaryEmbedding(nn.Module):
    """Rotary angles from one non-persistent buffer, ``inv_freq``."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", torch.empty(head_dim // 2), persistent=False)
        self.reset_buffer()

    def reset_buffer(self) -> None:
        """Compute the frequencies again, in place: `to_empty` leaves garbage that no checkpoint replaces."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=self.inv_freq.device)
        self.inv_freq.copy_(1.0 / 10_000 ** (exponents / self.head_dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # `.to(x.device)` is what the field's models do here. It is why an engine whose rotary buffer rests on the CPU
        # trains all the same, and why that alone must not count as a fault.
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.to(x.device)).repeat(1, 2)
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    """Causal attention with fewer key/value heads than query heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv = config.kv_heads * config.head_dim
        if config.lora_rank:
            self.q_proj: nn.Linear = LoraLinear(config.hidden, config.hidden, config.lora_rank)
        else:
            self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)))


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """One block: attention and MLP, each behind a norm and a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class DecoderBody(nn.Module):
    """Embedding, layers, final norm: what checkpoints call ``model``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden)
        self.rotary_emb = RotaryEmbedding(config.head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))


class TinyDecoder(nn.Module):
    """The lab's model: ``tokens (batch, length) int64 -> logits (batch, length, vocab)``.

    >>> model = TinyDecoder(DecoderConfig())
    >>> model(torch.zeros(1, 4, dtype=torch.int64)).shape
    torch.Size([1, 4, 37])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.lora_rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let head and embedding share one tensor, where the configuration says so."""
        if self.config.tie:
            self.lm_head.weight = self.model.embed_tokens.weight

    def reset_buffers(self) -> None:
        """Recompute what no checkpoint holds (the rotary frequencies), wherever the buffers are now."""
        self.model.rotary_emb.reset_buffer()

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(self.model(tokens)))


def source_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """The weights that an engine starts from: full CPU tensors by name, the same on every rank for the same seed.

    It stands in for the checkpoint on disk that a real engine reads.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = TinyDecoder(config)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
