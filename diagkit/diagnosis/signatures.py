"""Error texts that this field meets, named once.

A text is never a diagnosis: most of these have several causes, and one cause speaks in several texts. A rule lists
the names of the texts that it explains (``says``); facts decide between them. Patterns are short on purpose, so
that they hold across versions and devices. Texts were collected from runs on torch 2.9.1 and 2.13.0.
"""

from __future__ import annotations

import re

#: name -> what the message holds
SIGNATURES: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for name, pattern in {
        "set_storage": r"attempted to set the storage of a tensor on device \S+ to a storage on different device",
        "materialized": r"FSDP parameters should be materialized on CPU when enabling CPU offloading",
        "grad_device": r"attempting to assign a gradient with device type",
        "grad_dtype": r"attempting to assign a gradient with dtype",
        "sharding": r"sharding propagation failed",
        "several_devices": r"multiple devices found|^device mismatch$",
        "same_device": r"expected all tensors to be on the same device|found at least two devices",
        "swap": r"couldn'?t swap",
        "no_backend": r"no backend type associated with device type",
        "param_dtype": r"'FSDPParam' object has no attribute '(?:param_dtype|orig_dtype|reduce_dtype)'",
        "meta": r"meta tensor|meta device|device meta|'meta' backend|device=meta|to meta|from meta",
        "other_device": r"torch not compiled with \w+ enabled|not linked with support for \w+ devices"
        r"|no \w+ gpus are available|found no nvidia driver|device type at start of device string",
        "mixed": r"got mixed torch\.Tensor and DTensor",
        "gathered": r"'(?:Parameter|Tensor)' object has no attribute "
        r"'(?:full_tensor|to_local|redistribute|device_mesh|placements|_local_tensor|_spec)'",
    }.items()
}


def said(message: str) -> frozenset[str]:
    """The names of the texts that a message holds.

    >>> sorted(said('No backend type associated with device type cpu'))
    ['no_backend']
    """
    return frozenset(name for name, pattern in SIGNATURES.items() if pattern.search(message))
