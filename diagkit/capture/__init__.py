"""What runs inside a training process: standard library and the torch that is there, nothing else.

`record` watches a block of code, `attach` an engine's own operations, `snapshot` looks once. All leave the watched
objects exactly as they found them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from diagkit.capture.attachment import Attachment, attach
from diagkit.capture.begin import no_folder, start
from diagkit.capture.recorder import Recorder
from diagkit.capture.residency import residency
from diagkit.trace.reader import RankTrace, read_rank

__all__ = ["Attachment", "Recorder", "attach", "record", "residency", "snapshot", "start"]


@contextlib.contextmanager
def record(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Any = None,
    *,
    out: str | os.PathLike[str],
    detail: str = "transitions",
    engine: object | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    values: Iterable[str] = (),
) -> Iterator[Recorder]:
    """Records where every tensor of the model and optimizer lives while the block runs; one file a rank in the
    folder ``out``.

    Several models are told apart by ``{"actor": actor, "ref": ref}``. ``detail``: ``"phases"`` looks at the edges
    of phases alone, ``"transitions"`` also at every observed call that moves something, ``"full"`` also at unshard
    and reshard, gradients and device copies. ``values=("buffers",)`` (also ``"parameters"``) adds a digest of each
    local tensor of up to 16 MiB at the edges of phases, by which ranks can be held beside each other; it reads every
    byte of them, and waits for an accelerator on which they are.

    Raises:
        UsageError: an unknown detail or kind of values, something that is no model, or ``out`` that names no folder.
        TraceError: the folder is a file, or holds a trace already (``overwrite=True`` replaces it). A folder that
            cannot be written is a warning, and the block runs unrecorded.

    Example::

        with dk.record(model, optimizer, out="runs/a") as rec:
            with rec.phase("save"):
                engine.save_checkpoint(path)
    """
    if out is None:
        raise no_folder(out)
    recorder = start(
        model, optimizer, out=out, detail=detail, engine=engine, job=job, overwrite=overwrite, values=values
    )
    try:
        del model, optimizer, engine, job  # this frame lives as long as the block: it must not keep them alive
        yield recorder
    finally:
        recorder.close()


def snapshot(
    model: nn.Module | Mapping[str, nn.Module], optimizer: Any = None, engine: object | None = None
) -> RankTrace:
    """One look at a live model, as a trace of one moment; nothing is patched and no file is written."""
    recorder = start(model, optimizer, out=None, detail="phases", engine=engine)
    recorder.close()
    return read_rank(recorder.lines)
