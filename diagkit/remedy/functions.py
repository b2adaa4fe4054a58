"""What a function given to `nn.Module._apply` does to a tensor.

`_apply` gets a function and says nothing of what it will do. One of PyTorch's own (behind `to`, `cuda`, `npu`, `cpu`,
`to_empty`, `type` and the casts) depends on nothing but its tensor, so it is tried on an empty CPU tensor (no element,
no byte), and the result tells where parameters would go and as what. That holds on a plug-in's device, too, whose
functions no list of closures would know. A function of the user's own may count its calls or do whatever else: it is
never called once more than it would be anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from diagkit import torch_internals as internals
from diagkit.capture.gates import Function
from diagkit.capture.residency import quiet

#: Where parameters under the policy may be.
_HOME = ("cpu", "meta")


def is_torchs_own(fn: Function) -> bool:
    """Whether PyTorch, or its plug-in for the accelerator (``torch_npu``), wrote the function. Told by the module whose
    names it uses: ``__module__`` is copied by whoever wraps it."""
    home: Any = getattr(fn, "__globals__", {}).get("__name__", "")
    return str(home).partition(".")[0] in ("torch", f"torch_{internals.accelerator()[0]}")


def tried(fn: Function, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """What a function of PyTorch's own makes of an empty CPU tensor; None where it fails: then it does something else
    than moving."""
    try:
        with quiet(), torch.no_grad():
            return fn(torch.empty(0, dtype=dtype, device="cpu"))  # type: ignore[no-any-return]
    except Exception:
        return None


def abroad(result: torch.Tensor | None) -> bool:
    """Whether a parameter that came out like this would have left the CPU."""
    return isinstance(result, torch.Tensor) and result.device.type not in _HOME


def cast_of(fn: Function, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a function of PyTorch's own makes of this one."""
    result = tried(fn, dtype)
    return dtype if result is None else result.dtype
