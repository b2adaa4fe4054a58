"""Read where a module's tensors live: the wrapper's device, the device of the bytes, and whether these are pinned.

Nothing here calls an operator on a parameter, since on a split one even ``detach`` raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


def _where(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)
    storage = local.untyped_storage()
    pinned = " pinned" if storage.device.type == "cpu" and storage.nbytes() and local.is_pinned() else ""
    return f"{tensor.device.type}/{storage.device.type}{pinned}"


def _count(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    return dict(sorted(Counter(_where(tensor) for tensor in tensors).items()))


def residency(module: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Count parameters and buffers by ``metadata device/storage device [pinned]``, for example ``npu/cpu pinned``."""
    return {"parameters": _count(module.parameters()), "buffers": _count(module.buffers())}


def storages(module: torch.nn.Module) -> dict[str, int]:
    """Map each parameter's name to the address of its bytes, to see later whether the storage was exchanged."""
    return {
        name: getattr(parameter, "_local_tensor", parameter).untyped_storage().data_ptr()
        for name, parameter in module.named_parameters()
    }


def local_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy each parameter's local bytes to plain host memory, whatever state the wrapper is in."""
    with torch.no_grad():
        return {
            name: getattr(parameter, "_local_tensor", parameter).to("cpu", copy=True)
            for name, parameter in module.named_parameters()
        }


def failure(error: BaseException, package: str) -> dict[str, Any]:
    """Describe an exception: type, text, and the last frame that belongs to ``package``."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"/{package}/" in code.co_filename:
            path = code.co_filename.rsplit(f"/{package}/", 1)[1]
            frames.append(f"{package}/{path}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return {"type": type(error).__name__, "message": str(error), "frames": frames}
