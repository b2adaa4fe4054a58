"""What rows and ranks are called in sentences, for one and for many."""

from __future__ import annotations

from collections.abc import Sequence

from diagkit.language import msgn, trn
from diagkit.trace.schema import (
    BUFFER,
    ENGINE,
    EXPORT,
    GRADIENT,
    GROUP,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
)
from diagkit.trace.spans import spans_text

__all__ = ["counted", "ranks_named"]

_KINDS = {
    PARAMETER: msgn("{count} parameter", "{count} parameters"),
    BUFFER: msgn("{count} buffer", "{count} buffers"),
    GRADIENT: msgn("{count} gradient", "{count} gradients"),
    OPTIMIZER_STATE: msgn("{count} optimizer state", "{count} optimizer states"),
    EXPORT: msgn("{count} exported tensor", "{count} exported tensors"),
    GROUP: msgn("{count} FSDP group", "{count} FSDP groups"),
    ENGINE: msgn("{count} engine", "{count} engines"),
    OPTIMIZER: msgn("{count} optimizer", "{count} optimizers"),
}


def counted(kind: str, count: int) -> str:
    """So many rows of a kind.

    >>> counted("parameter", 21), counted("fsdp_group", 1)
    ('21 parameters', '1 FSDP group')
    """
    return trn(*_KINDS[kind], count)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ascending ranks by name.

    >>> ranks_named([3]), ranks_named([0, 1, 2])
    ('rank 3', 'ranks 0..2')
    """
    return trn("rank {ranks}", "ranks {ranks}", len(ranks), ranks=spans_text(ranks))
