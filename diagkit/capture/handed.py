"""Tensors that were handed out: read as they pass, kept by nobody.

An export that lives on its parameter's bytes is **lent**: whoever still holds it when they are written reads other
values than were exported. Whether somebody does is told by the number of tensors on the storage, asked of PyTorch by
the storage's address, which a weak reference keeps from being used again: no tensor is kept, and none gets a weak
reference, which would forbid swapping it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diagkit import torch_internals as internals
from diagkit.capture.entries import shape_of
from diagkit.capture.inventory import Exported
from diagkit.capture.ledger import Ledger
from diagkit.capture.operations import Operation
from diagkit.capture.residency import Key, quiet, read
from diagkit.trace.schema import CALL, PARAMETER


@dataclass(frozen=True, slots=True)
class Lent:
    """An export on its parameter's storage: how many tensors there were on it, and what was read."""

    storage: StorageWeakRef
    tensors: int
    key: Key

    @property
    def uses(self) -> int:
        """How many there are now."""
        return internals.storage_uses(self.storage.cdata)

    @property
    def held(self) -> bool:
        """Whether there are as many still."""
        return self.uses >= self.tensors > 0


@dataclass(slots=True)
class Export:
    """One export under way: what passed since it was last told, and which rows it has."""

    label: str | None
    live: set[int]  # storages of the parameters
    count: int = 0
    passed: list[Exported] = field(default_factory=list)
    lent: list[tuple[str, Lent]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class Exports:
    """All exports of a recorder."""

    def __init__(self, ledger: Ledger, follow: bool) -> None:
        self._ledger = ledger
        self._follow = follow  # remembers where what was handed out is
        self._open: list[Export] = []
        self._lent: dict[int, Lent] = {}  # by row
        self._uses: dict[int, int] = {}  # by row, before what is under way and may exchange tensors
        # Of the last export: its storages, whose addresses are not used again meanwhile, and their rows.
        self._places: dict[int, StorageWeakRef] = {}
        self._passed: dict[int, int] = {}

    def begin(self, label: str | None) -> Export:
        """An export of the model with this label."""
        export = Export(label, self._ledger.inventory.readings.storages(PARAMETER))
        if not self._open:
            self._places.clear()
            self._passed.clear()
        self._open.append(export)
        return export

    def look(self, export: Export, pair: object) -> None:
        """Reads what passes, if it is a (name, tensor)."""
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            return
        name, tensor = str(pair[0]), pair[1]
        with quiet():
            key, storage = read(tensor)
            if storage in export.live and (inner := internals.innermost(tensor)) is not None:
                place = StorageWeakRef(inner.untyped_storage())
                export.lent.append((name, Lent(place, internals.storage_uses(place.cdata), key)))
            export.passed.append((name, shape_of(tensor), key, storage))
            if self._follow and storage and (inner := internals.innermost(tensor)) is not None:
                self._places[storage] = StorageWeakRef(inner.untyped_storage())
        export.count += 1

    def tell(self) -> None:
        """Brings what has passed so far into the trace, so that a failure finds it there."""
        for export in self._open:
            if export.passed:
                self._take(export)
                self._ledger.write(CALL, f"export: {export.count} tensors so far")

    def row_of(self, storage: int) -> int | None:
        """The row of the tensor on this storage: one that is watched, or was handed out last."""
        row = self._ledger.inventory.readings.row_at(storage)
        if row is None and any(storage == its for export in self._open for *_, its in export.passed):
            self.tell()
        return self._passed.get(storage) if row is None else row

    def end(self, export: Export) -> None:
        """Tells the rest; what was exported is gone at the next reading."""
        self._open.remove(export)
        self._take(export)
        self._ledger.write(CALL, f"export: {export.count} tensors")
        self._ledger.inventory.let_go(export.rows)

    def _take(self, export: Export) -> None:
        inventory = self._ledger.inventory
        rows, changes = inventory.exported(export.passed, export.label)
        self._ledger.take(changes)
        export.rows += rows.values()
        self._passed.update(
            (its, rows[name]) for name, _, _, its in export.passed if name in rows and its in self._places
        )
        self._lent.update((rows[name], lent) for name, lent in export.lent if name in rows)
        export.passed, export.lent = [], []

    def due(self) -> None:
        """Before a call in which FSDP2 may make and drop tensors of its own: nobody lets go of an export by that."""
        self.tell()
        self._uses = {row: lent.uses for row, lent in self._lent.items()}

    def overtaken(self, operation: Operation) -> bool:
        """Parameters were written, or got other storages: whether somebody still holds an export from before."""
        if not (operation.writes or operation.renews) or not (self._open or self._lent):
            return False
        self.tell()
        if operation.writes:
            word, gone = "written", self._lent
            held = {row: lent.key for row, lent in gone.items() if lent.held}
        else:
            live = self._ledger.inventory.readings.storages(PARAMETER)
            word, gone = "stale", {row: lent for row, lent in self._lent.items() if lent.storage.cdata not in live}
            held = {row: lent.key for row, lent in gone.items() if lent.uses}
        self._lent = {row: self._after(row, lent) for row, lent in self._lent.items() if row not in gone}
        self._uses = {}
        if held:
            self._ledger.take(self._ledger.inventory.overtaken(held, word))
        return bool(held)

    def _after(self, row: int, lent: Lent) -> Lent:
        """With as many tensors more or less as FSDP2 itself has made or dropped since `due`."""
        return replace(lent, tensors=lent.tensors + lent.uses - self._uses[row]) if row in self._uses else lent
