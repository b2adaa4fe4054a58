"""A stand-in for torch_npu, for tests only: what verl and VeOmni look for on a machine that has an accelerator named
npu.

The simulated accelerator supplies the device. This package only answers the question "is torch_npu there?" and
offers the few fused operators that verl puts into Qwen2 on an npu, written in plain PyTorch. It is never installed:
the driver puts its folder on the path after the simulator has started, because diagkit rightly refuses to simulate
where torch_npu is present.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

__version__ = "0.0.0+standin"


def npu_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square norm of ``x`` over its last axis, scaled by ``weight``, and the reciprocal norm."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal * weight.float()).to(x.dtype), reciprocal


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Split ``x`` in two along ``dim`` and return silu(first) * second."""
    gate, up = x.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of the last axis of ``x`` by the angles whose cosine and sine are given."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """Refuse: transformers imports this name wherever torch_npu is, the tests ask for eager attention."""
    raise NotImplementedError("the stand-in torch_npu has no fused attention; ask for attn_implementation='eager'")


# VeOmni sets switches on these when it is imported; on a real npu, importing torch_npu is what creates them.
for _name in ("config", "matmul"):
    if not hasattr(torch.npu, _name):
        setattr(torch.npu, _name, SimpleNamespace())
