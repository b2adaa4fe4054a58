"""One operation of a lab engine, watched from outside: residency before and after, whole-model moves, first cause.

Rules of this module: the engine is not told that it is watched and contains nothing for it.
"""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals

__all__ = ["Observation", "observe", "residency", "summary"]

Residencies = dict[str, dict[str, Any]]


def residency(module: nn.Module) -> Residencies:
    """Metadata device, storage device, pinning of every parameter and buffer by name; moves and computes nothing."""
    rows: Residencies = {}
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            inner = torch_internals.innermost(tensor)
            storage = None if inner is None else inner.untyped_storage()
            rows[name] = {
                "kind": kind,
                "metadata": str(tensor.device),
                "storage": None if storage is None else str(storage.device),
                "pinned": None if inner is None or inner.device.type != "cpu" else inner.is_pinned(),
            }
    return rows


def short(row: dict[str, Any]) -> str:
    """``npu:0/cpu pinned``: metadata device, storage device, pinning."""
    return f"{row['metadata']}/{row['storage']}{' pinned' if row['pinned'] else ''}"


def summary(rows: Residencies) -> dict[str, dict[str, int]]:
    """How many parameters and buffers are where: ``{"parameters": {"cpu/cpu pinned": 21}, "buffers": {...}}``."""
    return {
        f"{kind}s": dict(Counter(short(row) for row in rows.values() if row["kind"] == kind))
        for kind in ("parameter", "buffer")
    }


@dataclass
class Observation:
    """What was seen of one operation."""

    rest: Residencies
    after_first_move: Residencies | None = None
    failure: Residencies | None = None
    end: Residencies | None = None
    moves: list[str] = field(default_factory=list)
    first_cause: str | None = None
    error: BaseException | None = None


@contextmanager
def observe(module: nn.Module) -> Iterator[Observation]:
    """Watch the block; an exception in it is kept in the observation and goes no further."""
    seen = Observation(rest=residency(module))
    undo = _watch_moves(module, seen)
    try:
        yield seen
    except Exception as error:
        seen.error = error
        seen.failure = residency(module)
    finally:
        undo()
        seen.end = residency(module)


def _watch_moves(module: nn.Module, seen: Observation) -> Any:
    original = module._apply

    @functools.wraps(original)
    def watched(fn: Any, recurse: bool = True) -> nn.Module:
        asked = str(fn(torch.empty(0)).device.type)
        result = original(fn, recurse)
        seen.moves.append(asked)
        if seen.after_first_move is None:
            seen.after_first_move = residency(module)
        if seen.first_cause is None and any(_split(row) for row in residency(module).values()):
            stack = [f.name for f in traceback.extract_stack() if "/torch/" not in f.filename]
            seen.first_cause = " -> ".join(stack[-4:-1])
        return result

    module._apply = watched  # type: ignore[method-assign]
    return lambda: module.__dict__.pop("_apply")


def _split(row: dict[str, Any]) -> bool:
    return row["storage"] is not None and row["metadata"].partition(":")[0] != row["storage"].partition(":")[0]
