"""The hazards, one small rule per code, grouped by family. Importing this room enters them all into the catalogue."""

from diagkit.diagnosis.rules import (
    buffers,
    collectives,
    engine,
    gradients,
    lifecycle,
    memory,
    meta,
    optimizer,
    placement,
    split,
    trained,
)

__all__ = [
    "buffers",
    "collectives",
    "engine",
    "gradients",
    "lifecycle",
    "memory",
    "meta",
    "optimizer",
    "placement",
    "split",
    "trained",
]
