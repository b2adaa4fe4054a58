"""Copies of watched tensors between host and accelerator, and whether somebody read one before it had arrived.

A `non_blocking` copy into pinned memory returns before its bytes are there. It is **under way** until something is seen
to wait for the device; a read that is seen before is **early**. PyTorch's own copies (FSDP2 stages parameters and
gradients so) are counted and not followed: it waits for them in its own way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diagkit import torch_internals as internals
from diagkit.capture.handed import Exports
from diagkit.capture.ledger import Ledger
from diagkit.capture.phases import Phases
from diagkit.capture.residency import EARLY, UNDER_WAY, Key, quiet, read
from diagkit.trace.schema import CALL, Cause

#: ``tell(operation, target, request)``: the cause of what happens now; None inside a call that will be told itself.
Causes = Callable[[str, str, str], Cause | None]


class Copies:
    """All copies that a recorder follows. Keeps no tensor: a copy is known by its storage's address."""

    def __init__(self, ledger: Ledger, exports: Exports, phases: Phases, causes: Causes) -> None:
        self._ledger = ledger
        self._exports = exports
        self._phases = phases
        self._causes = causes
        self._under_way: dict[int, tuple[int, StorageWeakRef, Key]] = {}  # storage -> row, and what was read of it

    def copied(self, name: str, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """A tensor was copied to another device."""
        with quiet():
            _, storage = read(source)
            key, arrives = read(target)
        row = self._exports.row_of(storage) if storage else None
        if row is None:
            row = self._exports.row_of(arrives) if arrives else None
        if row is None:
            return
        what = f"copy to {target.device.type}{', non_blocking' if non_blocking else ''}"
        if _by_pytorch():
            self._phases.note(what)
            return
        late = non_blocking and key[0] is not None and key[5] is True
        inner = internals.innermost(target)
        if late and inner is not None:
            copy, changes = self._ledger.inventory.copied(row, (*key, UNDER_WAY))
            self._under_way[arrives] = copy, StorageWeakRef(inner.untyped_storage()), key
            self._ledger.take(changes)
        self._tell(what, name, row, f"{source.device} -> {target.device}{', non_blocking' * non_blocking}")

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor is about to be read."""
        inner = internals.innermost(tensor) if self._under_way else None
        if inner is None or inner.device.type != "cpu":
            return
        found = self._under_way.pop(inner.untyped_storage()._cdata, None)
        if found is not None:
            row, _, key = found
            self._ledger.take(self._ledger.inventory.arrived_late(row, (*key, EARLY)))
            self._tell("read before arrival", name, row, "")

    def waited(self) -> None:
        """Something waited for the device: all copies are there."""
        if self._under_way:
            self._ledger.inventory.let_go([row for row, *_ in self._under_way.values()])
            self._under_way.clear()

    def _tell(self, label: str, name: str, row: int, request: str) -> None:
        cause = self._causes(name, self._ledger.inventory.readings.rows[row].name, request)
        if cause is None:
            self._phases.note(label)
        else:
            self._ledger.write(CALL, label, cause=cause)


def _by_pytorch() -> bool:
    """Whether the nearest code that is not ours is `torch.distributed`'s."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("diagkit.capture"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
