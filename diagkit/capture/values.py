"""The opt-in probe: a short digest of what a tensor holds, so that ranks and runs can be held beside each other.

The one place where bytes are read, and only where somebody asked for it (``values=``). Bytes on the CPU are read in
place; those on an accelerator are copied to the CPU first, which waits for the device: up to `LIMIT` bytes a tensor at
each edge of a phase. Nothing is changed and nothing kept but the digest.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch

from diagkit import torch_internals as internals
from diagkit.errors import UsageError
from diagkit.trace.schema import BUFFER, PARAMETER

#: Larger tensors get no digest.
LIMIT = 16 << 20
#: What may be asked for -> kind of row.
KINDS = {"buffers": BUFFER, "parameters": PARAMETER}


def kinds_of(values: Iterable[str]) -> frozenset[str]:
    """The kinds of row of which digests are wanted.

    Raises:
        UsageError: something else was asked for.
    """
    names = [values] if isinstance(values, str) else list(values)
    for name in names:
        if name not in KINDS:
            raise UsageError("no values of these", found=name, expected=", ".join(KINDS), where="values=")
    return frozenset(KINDS[name] for name in names)


def digest(tensor: torch.Tensor) -> bytes | None:
    """Twelve bytes that two tensors share whose local parts have equal dtype, shape and bytes; None for one without
    bytes, one that cannot be read, or a large one."""
    inner = internals.innermost(tensor)
    if inner is None or inner.is_meta or inner.layout is not torch.strided or inner.numel() == 0:
        return None
    size = inner.numel() * inner.element_size()
    if size > LIMIT or not _holds_its_bytes(inner):
        return None
    with torch.no_grad():
        local = inner if inner.device.type == "cpu" else inner.cpu()
        if not local.is_contiguous():
            local = local.contiguous()
    found = hashlib.blake2b(f"{local.dtype} {tuple(local.shape)}".encode(), digest_size=12)
    found.update((ctypes.c_char * size).from_address(internals.address(local)))
    return found.digest()


def _holds_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether the storage still reaches as far as the tensor does: `untyped_storage().resize_(0)`, which offloaders and
    FSDP itself use to free memory, leaves the tensor's shape as it was, and reading it ends the process."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in strides)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
