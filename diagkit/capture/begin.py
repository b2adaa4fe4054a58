"""Sets a recorder to work: checks what it was given, opens the trace, watches, and looks for the first time."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from diagkit.capture.process import describe
from diagkit.capture.recorder import Recorder
from diagkit.capture.values import kinds_of
from diagkit.errors import TraceError, UsageError
from diagkit.trace.schema import DETAILS, Header
from diagkit.trace.writer import MemorySink, NullSink, TraceWriter


def start(
    model: nn.Module | Mapping[str, nn.Module] | None,
    optimizer: Any = None,
    *,
    out: str | os.PathLike[str] | None,
    detail: str = "transitions",
    engine: object | None = None,
    run: str | None = None,
    job: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    wants: Callable[[str], bool] = lambda name: True,
    limit: int = 0,
    values: Iterable[str] = (),
) -> Recorder:
    """A recorder at work; ``out=None`` keeps the trace in memory. ``wants`` says of a tensor's name whether it is
    watched; at a size of ``limit`` bytes (0: none) the trace keeps failures only; ``values`` as for `record`.

    Raises:
        UsageError: unknown detail or values, something that is no model, or ``out`` that names no folder.
        TraceError: the folder is a file, or holds a trace already. A folder that cannot be written is a warning.
    """
    if detail not in DETAILS:
        raise UsageError("unknown detail", found=detail, expected=", ".join(DETAILS), remedy="Choose one of these")
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise no_folder(out)
    for root in model.values() if isinstance(model, Mapping) else (model,):
        if root is not None and not isinstance(root, nn.Module):
            raise UsageError(
                "this cannot be watched",
                found=type(root).__name__,
                expected='a torch.nn.Module, or several as {"actor": actor, "ref": ref}',
            )
    probed = kinds_of(values)
    recorder = Recorder(_writer(out, _header(detail, run, job), overwrite, limit), detail, wants, probed)
    try:
        recorder.watch(model, optimizer, engine)
        if detail != "phases":
            recorder.observe()
        recorder.mark("start")
    except BaseException:  # an interrupt by hand: whoever wanted the recorder never gets it, and could not close it
        recorder.close()
        raise
    return recorder


def no_folder(out: object) -> UsageError:
    """The error of a caller who gave something else than the trace's folder."""
    return UsageError(
        "no folder for the trace", found=type(out).__name__, expected="a path", remedy='Name one: out="runs/a"'
    )


def _header(detail: str, run: str | None, job: Mapping[str, Any] | None) -> Header:
    try:
        header = describe(detail, run, job)
        try:
            json.dumps(asdict(header), default=str)
        except Exception as error:  # what the caller said of the job holds itself, or cannot be copied
            header = replace(header, job={"undescribed": f"{type(error).__name__}: {error}"[:200]})
        return header
    except Exception as error:  # what cannot be told about a process is no reason to disturb it
        rank = os.environ.get("RANK", "")
        why = f"{type(error).__name__}: {error}"[:200]
        return Header(run=run or "", rank=int(rank) if rank.isdigit() else 0, detail=detail, job={"undescribed": why})


def _writer(out: str | os.PathLike[str] | None, header: Header, overwrite: bool, limit: int) -> TraceWriter:
    if out is None:
        return TraceWriter(MemorySink(), header)
    try:
        return TraceWriter.create(out, header, overwrite=overwrite, limit=limit)
    except TraceError as error:
        # A wrong argument is told at once. What a job meets only on some node (no rights, a full disk) must not end it.
        why = error.__cause__
        if not isinstance(why, OSError) or isinstance(why, (FileExistsError, NotADirectoryError)):
            raise
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}."
    with contextlib.suppress(Exception):
        warnings.warn(f"diagkit records nothing: {reason} The job goes on.", RuntimeWarning, stacklevel=4)
    return TraceWriter(NullSink(), Header(detail=header.detail))  # nothing in it that could fail once more
