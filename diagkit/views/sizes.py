"""How many bytes a tensor takes on this rank, from what its trace says: shapes and dtypes, nothing measured.

The rules: what the trace does not say is None, never a guess; padding that FSDP2 adds for its all-gather is not
counted, for no record holds it.
"""

from __future__ import annotations

import math
import re

from diagkit.trace.rank import RankTrace
from diagkit.trace.schema import Residency, Row

__all__ = ["human", "item_size", "local_bytes", "whole_bytes"]

_BITS = re.compile(r"[a-z]+?(\d+)")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def item_size(dtype: str) -> int | None:
    """Bytes of one element of a torch dtype; None for a name that does not tell.

    >>> item_size("bfloat16"), item_size("float8_e4m3fn"), item_size("bool"), item_size("")
    (2, 1, 1, None)
    """
    if dtype == "bool":
        return 1
    bits = _BITS.match(dtype)
    return max(1, int(bits[1]) // 8) if bits and len(bits[1]) < 4 else None  # what is less than a byte takes one


def local_bytes(rank: RankTrace, row: Row, facts: Residency) -> int | None:
    """Bytes of the row's own tensor on this rank: its shard, where it is a DTensor."""
    if facts.empty or facts.storage_device == "meta":
        return 0
    shape = rank.local_shapes.get(row.id)
    if shape is None and row.of is not None and rank.rows[row.of].shape == row.shape:
        shape = rank.local_shapes.get(row.of)  # a gradient or a moment is laid out like its parameter
    if shape is None and facts.wrapper != "DTensor":
        shape = row.shape
    return _bytes(shape, facts.storage_dtype or facts.dtype)


def whole_bytes(row: Row, facts: Residency) -> int | None:
    """Bytes of the whole tensor in its own dtype: what a rank holds beside its shard while it is gathered."""
    return _bytes(row.shape, facts.dtype or facts.storage_dtype)


def human(count: int) -> str:
    """A number of bytes in words of at most three digits; 1 kB is 1,024 B, as torch counts.

    >>> human(0), human(1023), human(1536), human(123456789)
    ('0 B', '1,023 B', '1.5 kB', '118 MB')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = f"{value:,.0f}" if unit == 0 or value >= 99.5 else f"{value:.1f}".removesuffix(".0")
    return f"{digits} {_UNITS[unit]}"


def _bytes(shape: tuple[int, ...] | None, dtype: str) -> int | None:
    size = item_size(dtype)
    return None if shape is None or size is None else math.prod(shape) * size
