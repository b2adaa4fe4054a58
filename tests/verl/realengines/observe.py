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


def watch(module: torch.nn.Module, moments: dict[str, Any]) -> None:
    """Put into ``moments["inside"]`` the residency at the operation's first use of the module.

    That is after whatever the engine moved beforehand, and before it moves anything back: at the first ``state_dict``,
    ``load_state_dict`` or forward of the root.
    """

    def note(*_: Any) -> None:
        moments.setdefault("inside", residency(module))

    module.register_state_dict_pre_hook(note)
    module.register_load_state_dict_pre_hook(note)
    # Before FSDP's own hook, whose check is what refuses a split parameter.
    module.register_forward_pre_hook(note, prepend=True)


def storages(module: torch.nn.Module) -> dict[str, torch.UntypedStorage]:
    """Hold each parameter's storage, to see later whether it was exchanged.

    Held and not noted as an address: a freed address may be given to the next storage.
    """
    return {
        name: getattr(parameter, "_local_tensor", parameter).untyped_storage()
        for name, parameter in module.named_parameters()
    }


def exchanged(before: dict[str, torch.UntypedStorage], after: dict[str, torch.UntypedStorage]) -> str:
    """Say how many storages are others than before, as ``3/27``; a shard without elements has none to exchange."""
    held = {name: storage for name, storage in before.items() if storage.nbytes()}
    return f"{sum(held[name].data_ptr() != after[name].data_ptr() for name in held)}/{len(held)}"


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
