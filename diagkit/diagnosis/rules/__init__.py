"""The hazards, one small rule per code, grouped by family. Importing this room enters them all into the catalogue."""

from diagkit.diagnosis.rules import (
    buffers,
    collectives,
    copies,
    engine,
    gradients,
    handed,
    lifecycle,
    memory,
    meta,
    optimizer,
    placement,
    probes,
    ranks,
    split,
    trained,
)

__all__ = [
    "buffers",
    "collectives",
    "copies",
    "engine",
    "gradients",
    "handed",
    "lifecycle",
    "memory",
    "meta",
    "optimizer",
    "placement",
    "probes",
    "ranks",
    "split",
    "trained",
]
