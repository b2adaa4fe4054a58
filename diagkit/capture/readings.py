"""Rows, and what was last read of each: a reading anew tells what changed since.

A storage is known by the address of its C++ object; a `StorageWeakRef` keeps that from being used again while the
bytes are free to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from diagkit import torch_internals as internals
from diagkit.capture.changes import merge
from diagkit.capture.entries import Buffer, Slot
from diagkit.capture.glance import STRIDE, Signature, glance
from diagkit.capture.residency import decode
from diagkit.capture.values import digest
from diagkit.trace.schema import (
    ABSENT,
    GRADIENT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    TENSOR_KINDS,
    Change,
    Facts,
    Row,
)

Shape = tuple[int, ...] | None


class Readings:
    """All rows, what stands behind each (an entry), and its last reading.

    ``define(rows, local_shapes)`` is called with every new block of rows before it is used; ``number(facts)`` gives
    the trace's number of a record.
    """

    def __init__(self, define: Callable[[list[Row], list[Shape]], None], number: Callable[[Facts], int]) -> None:
        self._define = define
        self._number = number
        self.rows: list[Row] = []
        self.entries: list[Any] = []
        self.index: dict[tuple[str, str, str, str], int] = {}  # kind, model, name, part -> row
        self.blocks: list[tuple[str, range]] = []
        self.faults: list[str] = []  # what went wrong while reading, as text: an exception would keep tensors alive
        self._keys: list[Any] = []
        self._numbers: list[int] = []
        self._storages: list[int] = []
        self._held: list[StorageWeakRef | None] = []
        self._known: dict[Any, int] = {}  # key -> number of its record
        self._undefined: list[list[Row]] = []  # rows that the trace has no name for yet
        self._glances: dict[int, Signature | None] = {}  # first row of a stride -> its last signature
        self._parameters = 0  # counts up when a parameter may have been exchanged
        self.probed: frozenset[str] = frozenset()  # kinds whose values are asked for
        self._digests: dict[int, bytes | None] = {}
        self._edge = False  # values are read now
        self._exchanges = 0  # counts up when a row has another storage
        self._at: tuple[int, dict[int, int]] = (-1, {})  # storage -> row, as of so many exchanges
        self._afresh = False  # read also what a storage that is still the same one cannot change

    def of(self, kind: str, model: str | None = None) -> Iterator[int]:
        """The rows of a kind, of one model or of all."""
        for its, block in self.blocks:
            if its == kind and model in (None, self.rows[block[0]].model):
                yield from block

    def add(self, found: Iterable[tuple[Row, Any]]) -> None:
        """Gives each its row: a known name keeps its number and gets its new entry, the others become a new block."""
        new: list[tuple[Row, Any]] = []
        for row, entry in found:
            number = self.index.get((row.kind, row.model, row.name, row.part))
            if number is None:
                new.append((row, entry))
            elif isinstance(known := self.entries[number], (Slot, Buffer)):
                known.become(entry)  # gradients and optimizer states look through the same slot
            else:
                self.entries[number] = entry
        if not new:
            return
        base = len(self.rows)
        rows = [Row(base + i, r.kind, r.model, r.name, r.part, r.shape, r.of) for i, (r, _) in enumerate(new)]
        try:
            self._append(rows, [entry for _, entry in new])
        except BaseException:  # an interrupt by hand: a row is in every column or in none
            self._cut(base)
            raise
        self._define_all()

    def _append(self, rows: list[Row], entries: list[Any]) -> None:
        self.index.update({(row.kind, row.model, row.name, row.part): row.id for row in rows})
        self.entries += entries
        blank: list[tuple[list[Any], Any]] = [(self._keys, None), (self._numbers, ABSENT), (self._storages, 0)]
        for column, nothing in (*blank, (self._held, None)):
            column.extend([nothing] * len(rows))
        self.rows += rows
        self.blocks.append((rows[0].kind, range(rows[0].id, rows[0].id + len(rows))))
        self._undefined.append(rows)

    def _cut(self, base: int) -> None:
        """Takes out what `_append` had put in of rows from this one on."""
        for name in [name for name, row in self.index.items() if row >= base]:
            del self.index[name]
        for column in (self.entries, self._keys, self._numbers, self._storages, self._held, self.rows):
            del column[base:]
        self.blocks[:] = [block for block in self.blocks if block[1].start < base]
        self._undefined[:] = [undefined for undefined in self._undefined if undefined[0].id < base]

    def _define_all(self) -> None:
        """Names new rows in the trace; those whose turn failed once are named before any other."""
        while self._undefined:
            rows = self._undefined[0]
            self._define(rows, [self._local_shape(row) for row in rows])
            del self._undefined[0]

    def _local_shape(self, row: Row) -> Shape:
        try:
            tensor = self.entries[row.id].tensor() if row.kind in TENSOR_KINDS else None
            local = None if tensor is None else internals.local_tensor(tensor)
            return None if local is None else tuple(local.shape)
        except Exception:  # the reading of the row itself will tell why
            return None

    def scan(self, kinds: frozenset[str], afresh: bool, edge: bool = False) -> list[Change]:
        """Reads all rows of these kinds, within `quiet`; what changed since they were last read.

        ``afresh`` asks again whether memory is pinned that was there before: it can be page-locked in place. At the
        ``edge`` of a phase the values of probed kinds are read, too.
        """
        changes: list[Change] = []
        self._edge = edge and bool(self.probed)
        self._afresh = afresh or self._edge
        if self._undefined:
            self.shielded("tables", self._define_all)
        for kind, block in self.blocks:
            if kind in kinds:
                read_row = self._reader_of(kind)
                rows = self._worth_reading(kind, block)
                for _ in block:  # one row that cannot be read must not hide those behind it
                    if self.shielded(kind, read_row, rows, changes):
                        break
        return merge(changes)

    def forget_glances(self) -> None:
        """What was not read must be read next time."""
        self._glances.clear()

    def _worth_reading(self, kind: str, block: range) -> Iterator[int]:
        """The rows of a block, less those at which a glance shows nothing new."""
        for start in range(block.start, block.stop, STRIDE):
            stop = min(start + STRIDE, block.stop)
            signature = None if self._afresh else glance(kind, self.entries[start:stop])
            if kind in (OPTIMIZER, OPTIMIZER_STATE) and signature is not None:  # they are what they are to parameters
                signature = (*signature, self._parameters)
            if signature is None or signature != self._glances.get(start):
                self._glances[start] = signature
                self._parameters += kind == PARAMETER
                yield from range(start, stop)

    def shielded(self, what: str, method: Callable[..., None], *args: Any) -> bool:
        """Whether it did its work; what it raised is noted, and what was not read is read next time."""
        try:
            method(*args)
        except Exception as error:
            self.forget_glances()
            if len(self.faults) < 100:
                self.faults.append(f"reading {what}: {type(error).__name__}: {error}"[:500])
            return False
        return True

    def state(self, exchanged: set[int]) -> list[Change]:
        """The whole state as last read; ``exchanged``: rows whose storage was exchanged since the last moment."""
        return merge(
            [Change(row, 1, number, row in exchanged) for row, number in enumerate(self._numbers) if number != ABSENT]
        )

    def _read_tensors(self, rows: Iterator[int], changes: list[Change]) -> None:
        keys, storages, entries, afresh = self._keys, self._storages, self.entries, self._afresh
        for row in rows:
            known, held = keys[row], storages[row]
            key, storage = entries[row].read(None if afresh else known, held)
            if storage != held or key != known:
                self.note(row, key, storage, changes)

    def _reader_of(self, kind: str) -> Callable[[Iterator[int], list[Change]], None]:
        if kind in self.probed:
            return self._read_values
        return self._read_tensors if kind in TENSOR_KINDS else self._read_facts

    def _read_values(self, rows: Iterator[int], changes: list[Change]) -> None:
        for row in rows:
            key, storage = self.entries[row].read(None if self._afresh else self._keys[row], self._storages[row])
            if self._edge:
                tensor = self.entries[row].tensor()
                self._digests[row] = None if tensor is None else digest(tensor)
            if key is not None and (found := self._digests.get(row)) is not None:
                key = (*key, found)
            if storage != self._storages[row] or key != self._keys[row]:
                self.note(row, key, storage, changes)

    def _read_facts(self, rows: Iterator[int], changes: list[Change]) -> None:
        for row in rows:
            facts = self.entries[row].read()
            if facts is self._keys[row]:
                continue
            number = ABSENT if facts is None else self._number(facts)
            self._keys[row] = facts
            if number != self._numbers[row]:
                self._numbers[row] = number
                changes.append(Change(row, 1, number))

    def note(self, row: int, key: Any, storage: int, changes: list[Change]) -> None:
        """Takes in one reading; a change where it is news."""
        before = self._storages[row]
        # A gradient has a new storage every step: no exchange worth telling.
        exchanged = 0 != before != storage != 0 and self._numbers[row] != ABSENT and self.rows[row].kind != GRADIENT
        number = self._number_of(key)
        if before != storage:
            self._exchanges += 1
            self._held[row] = self._hold(row, storage)
            self._storages[row] = storage
        self._keys[row] = key
        if number != self._numbers[row] or exchanged:
            self._numbers[row] = number
            changes.append(Change(row, 1, number, exchanged))

    def _number_of(self, key: Any) -> int:
        if key is None:
            return ABSENT
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._number(decode(key))
        return number

    def _hold(self, row: int, storage: int) -> StorageWeakRef | None:
        """Keeps the storage's address from being used again, so that an exchange cannot go unnoticed."""
        if not storage:
            return None
        tensor = self.entries[row].tensor()
        inner = None if tensor is None else internals.innermost(tensor)
        return None if inner is None else StorageWeakRef(inner.untyped_storage())

    def row_at(self, storage: int) -> int | None:
        """The first row on this storage, as last read."""
        if self._exchanges != self._at[0]:
            self._at = self._exchanges, {its: row for row, its in reversed(list(enumerate(self._storages)))}
        return self._at[1].get(storage)

    def storages(self, kind: str) -> set[int]:
        """The storages of all rows of a kind, as last read."""
        return {self._storages[row] for row in self.of(kind)}
