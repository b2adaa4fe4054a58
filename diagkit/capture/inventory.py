"""What is watched: models, their gradients, optimizers, engines; and what changed since last time.

Nothing watched is kept alive. Modules, FSDP2's records and optimizers are held by weak references; tensors not even
so, because PyTorch refuses to swap a tensor that has a weak reference (`torch.utils.swap_tensors`, which
``model.to()`` uses for DTensors): they are looked up in their module's slot every time. A storage is known by the
address of its C++ object; a `StorageWeakRef` keeps that from being used again while the bytes are free to go.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from diagkit import torch_internals as internals
from diagkit.capture.changes import merge
from diagkit.capture.entries import Gradient, Handed, Slot
from diagkit.capture.facts import EngineWatch, OptimizerWatch
from diagkit.capture.glance import STRIDE, Signature, any_gradient, glance
from diagkit.capture.residency import Key, decode, quiet
from diagkit.capture.subjects import module_of
from diagkit.capture.survey import Model, Survey, states, survey
from diagkit.trace.schema import (
    ABSENT,
    BUFFER,
    ENGINE,
    EXPORT,
    GRADIENT,
    GROUP,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    TENSOR_KINDS,
    Change,
    Facts,
    Row,
)

#: Kinds of row read at each occasion.
EVERYTHING = frozenset((PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, EXPORT, GROUP, OPTIMIZER, ENGINE))
MODEL = frozenset((PARAMETER, BUFFER, GRADIENT, GROUP))
STATES = frozenset((OPTIMIZER_STATE, OPTIMIZER))

Shape = tuple[int, ...] | None


class Inventory:
    """All rows, what stands behind each, and its last reading.

    ``define(rows, local_shapes)`` is called with every new block of rows before it is used; ``number(facts)`` gives
    the trace's number of a record.
    """

    def __init__(
        self,
        define: Callable[[list[Row], list[Shape]], None],
        number: Callable[[Facts], int],
        wants: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._define = define
        self._number = number
        self._wants = wants  # whether a tensor of this name gets a row
        self._unlisted: dict[str, list[Slot]] = {}  # by model: parameters without a row, live all the same
        self.rows: list[Row] = []
        self.models: list[Model] = []
        self.dirty = False  # a module, parameter or FSDP group was added somewhere: look again before the next reading
        self._blocks: list[tuple[str, range]] = []
        self._entries: list[Any] = []
        self._keys: list[Any] = []
        self._numbers: list[int] = []
        self._storages: list[int] = []
        self._held: list[StorageWeakRef | None] = []
        self._known: dict[Any, int] = {}  # key -> number of its record
        self._index: dict[tuple[str, str, str, str], int] = {}  # kind, model, name, part -> row
        self._optimizers: list[OptimizerWatch] = []
        self._undefined: list[list[Row]] = []  # rows that the trace has no name for yet
        self.faults: list[str] = []  # what went wrong while reading, as text: an exception would keep tensors alive
        self._glances: dict[int, Signature | None] = {}  # first row of a stride -> its last signature
        self._other_parameters = True  # since optimizers were last held against the parameters
        self._afresh = False  # read also what a storage that is still the same one cannot change

    # ---- what is watched

    def add_model(self, root: nn.Module, label: str = "model") -> None:
        """Watches a model; a second time is harmless."""
        if any(model.root() is root for model in self.models):
            return
        taken = {model.label for model in self.models}
        name = next(n for n in (label, *(f"{label}{i}" for i in range(2, len(taken) + 3))) if n not in taken)
        model = Model(name, weakref.ref(root), {})
        self.models.append(model)
        self._take_in(model, root)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Watches an optimizer and its state; a second time is harmless."""
        if any(watch.optimizer() is optimizer for watch in self._optimizers):
            return
        watch = OptimizerWatch(weakref.ref(optimizer))
        self._optimizers.append(watch)
        n = len(self._optimizers)
        name, part = type(optimizer).__name__, "" if n == 1 else str(n)
        self._add([(Row(0, OPTIMIZER, self._trained_by(optimizer), name, part=part), watch)])

    def add_engine(self, engine: object, label: str | None = None) -> None:
        """Watches an engine's own offload flags; an object without weak references is left alone."""
        model, name = label or self._label(), type(engine).__name__
        with contextlib.suppress(TypeError):
            for n in itertools.count(1):
                part = "" if n == 1 else str(n)
                known = self._index.get((ENGINE, model, name, part))
                if known is not None and self._entries[known].watches(engine):
                    return
                if known is None:
                    self._add([(Row(0, ENGINE, model, name, part), EngineWatch(engine))])
                    return

    def _label(self) -> str:
        return self.models[0].label if self.models else "model"

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> str:
        """Label of the model whose parameters the optimizer holds; the first model's where it holds none's."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        labels = (m.label for m in self.models if any(id(p) in held for p in self._live(m.label)))
        return next(labels, self._label())

    def watches(self, module: object) -> bool:
        """Whether this very module belongs to a watched model."""
        return any(id(module) in model.names for model in self.models)

    def concerns(self, subject: object) -> bool:
        """Whether a call on this module, FSDP2 part or optimizer is about what is watched. Strangers that belong to no
        model (a state dict on its way to a disk) concern everybody."""
        if isinstance(subject, torch.optim.Optimizer):
            return not self._optimizers or any(watch.optimizer() is subject for watch in self._optimizers)
        module = module_of(subject)
        if module is None or self.watches(module):
            return True
        if self.dirty:
            self.look_again()  # it may be one of those that were just added
        return self.watches(module)

    def live_parameters(self) -> Iterator[Iterator[torch.Tensor]]:
        """Model by model, the trained parameter of every slot, ties once."""
        return (self._live(model.label) for model in self.models)

    def _live(self, label: str) -> Iterator[torch.Tensor]:
        blocks = (block for kind, block in self._blocks if kind == PARAMETER and self.rows[block[0]].model == label)
        listed = (self._entries[row] for block in blocks for row in block)
        for slot in itertools.chain(listed, self._unlisted.get(label, ())):
            if not slot.tie and (tensor := slot.tensor()) is not None:
                yield tensor

    def look_again(self) -> None:
        """Takes in modules, parameters and FSDP groups that came since."""
        self.dirty = False
        for model in self.models:
            if (root := model.root()) is not None:
                self._take_in(model, root)

    def _take_in(self, model: Model, root: nn.Module) -> None:
        with quiet():
            found = survey(root, model.label)
            model.names = found.names
            self.faults += found.faults
            self._leave_out(found, model.label)
            there: set[tuple[str, str, str, str]] = set()
            for block in (found.parameters, found.buffers, found.groups):
                there.update((row.kind, row.model, row.name, row.part) for row, _ in block)
                self._add(block)
        for key, row in self._index.items():
            if key[0] in (PARAMETER, BUFFER, GROUP) and key[1] == model.label and key not in there:
                self._entries[row].leave()

    def _leave_out(self, found: Survey, label: str) -> None:
        self._unlisted[label] = [slot for row, slot in found.parameters if not self._wants(row.name)]
        if self._unlisted[label]:
            found.parameters = [pair for pair in found.parameters if self._wants(pair[0].name)]
        found.buffers = [pair for pair in found.buffers if self._wants(pair[0].name)]

    def _add(self, found: Iterable[tuple[Row, Any]]) -> None:
        """Gives each its row: a known name keeps its number and gets its new entry, the others become a new block."""
        new: list[tuple[Row, Any]] = []
        for row, entry in found:
            number = self._index.get((row.kind, row.model, row.name, row.part))
            if number is None:
                new.append((row, entry))
            elif isinstance(known := self._entries[number], Slot):
                known.become(entry)  # gradients and optimizer states look through the same slot
            else:
                self._entries[number] = entry
        if not new:
            return
        base = len(self.rows)
        rows = [Row(base + i, r.kind, r.model, r.name, r.part, r.shape, r.of) for i, (r, _) in enumerate(new)]
        for row, (_, entry) in zip(rows, new, strict=True):
            self._index[row.kind, row.model, row.name, row.part] = row.id
            self._entries.append(entry)
        blank: list[tuple[list[Any], Any]] = [(self._keys, None), (self._numbers, ABSENT), (self._storages, 0)]
        for column, nothing in (*blank, (self._held, None)):
            column.extend([nothing] * len(rows))
        self.rows += rows
        self._blocks.append((rows[0].kind, range(base, base + len(rows))))
        self._undefined.append(rows)
        self._define_all()

    def _define_all(self) -> None:
        """Names new rows in the trace; those whose turn failed once are named before any other."""
        while self._undefined:
            rows = self._undefined[0]
            self._define(rows, [self._local_shape(row) for row in rows])
            del self._undefined[0]

    def _local_shape(self, row: Row) -> Shape:
        try:
            tensor = self._entries[row.id].tensor() if row.kind in TENSOR_KINDS else None
            local = None if tensor is None else internals.local_tensor(tensor)
            return None if local is None else tuple(local.shape)
        except Exception:  # the reading of the row itself will tell why
            return None

    # ---- reading

    def scan(self, kinds: frozenset[str], afresh: bool = False) -> list[Change]:
        """Reads all rows of these kinds; what changed since they were last read.

        ``afresh`` asks again whether memory is pinned that was there before: it can be page-locked in place.
        """
        changes: list[Change] = []
        self._afresh = afresh
        try:
            self._scan(kinds, changes)
        except BaseException:  # an interrupt by hand: what was not read must be read next time
            self._glances.clear()
            raise
        finally:
            for watch in self._optimizers:
                self._shielded("optimizers", watch.forget)
        return merge(changes)

    def _scan(self, kinds: frozenset[str], changes: list[Change]) -> None:
        with quiet():
            if self._undefined:
                self._shielded("tables", self._define_all)
            if GRADIENT in kinds:
                self._shielded("gradients", self._find_gradients)
            if OPTIMIZER_STATE in kinds:
                self._shielded("optimizer states", self._find_states)
            for kind, block in self._blocks:
                if kind in kinds:
                    read_row = self._read_tensors if kind in TENSOR_KINDS else self._read_facts
                    rows = self._worth_reading(kind, block)
                    for _ in block:  # one row that cannot be read must not hide those behind it
                        if self._shielded(kind, read_row, rows, changes):
                            break

    def _optimizers_may_differ(self) -> bool:
        """Whether a parameter or a parameter group was exchanged since the optimizers were last held against them."""
        if not self._afresh and not self._other_parameters and not any(watch.regrouped() for watch in self._optimizers):
            return False
        self._other_parameters = False
        return True

    def _worth_reading(self, kind: str, block: range) -> Iterator[int]:
        """The rows of a block, less those at which a glance shows nothing new."""
        if kind == OPTIMIZER and not self._optimizers_may_differ():
            return
        for start in range(block.start, block.stop, STRIDE):
            stop = min(start + STRIDE, block.stop)
            signature = None if self._afresh else glance(kind, self._entries[start:stop])
            if signature is None or signature != self._glances.get(start):
                self._glances[start] = signature
                self._other_parameters |= kind == PARAMETER
                yield from range(start, stop)

    def _shielded(self, what: str, method: Callable[..., None], *args: Any) -> bool:
        try:
            method(*args)
        except Exception as error:
            self._glances.clear()  # what was not read must be read next time
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
        keys, storages, entries, afresh = self._keys, self._storages, self._entries, self._afresh
        for row in rows:
            known, held = keys[row], storages[row]
            key, storage = entries[row].read(None if afresh else known, held)
            if storage != held or key != known:
                self._note(row, key, storage, changes)

    def _read_facts(self, rows: Iterator[int], changes: list[Change]) -> None:
        for row in rows:
            entry = self._entries[row]
            facts = entry.read(self.live_parameters()) if isinstance(entry, OptimizerWatch) else entry.read()
            if facts is self._keys[row]:
                continue
            number = ABSENT if facts is None else self._number(facts)
            self._keys[row] = facts
            if number != self._numbers[row]:
                self._numbers[row] = number
                changes.append(Change(row, 1, number))

    def _note(self, row: int, key: Any, storage: int, changes: list[Change]) -> None:
        before = self._storages[row]
        # A gradient has a new storage every step: no exchange worth telling.
        exchanged = 0 != before != storage != 0 and self._numbers[row] != ABSENT and self.rows[row].kind != GRADIENT
        number = self._number_of(key)
        if before != storage:
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
            tie = isinstance(key[-1], str) and key[-1] in ("tie", "parameter")
            number = self._known[key] = self._number(decode(key[:-1], key[-1]) if tie else decode(key))
        return number

    def _hold(self, row: int, storage: int) -> StorageWeakRef | None:
        """Keeps the storage's address from being used again, so that an exchange cannot go unnoticed."""
        if not storage:
            return None
        tensor = self._entries[row].tensor()
        inner = None if tensor is None else internals.innermost(tensor)
        return None if inner is None else StorageWeakRef(inner.untyped_storage())

    def exported(self, readings: list[tuple[str, Shape, Key, int]], label: str | None = None) -> list[Change]:
        """Makes rows for tensors that were handed out (name, global shape, key, storage); what changed by them."""
        live = {self._storages[row] for kind, block in self._blocks if kind == PARAMETER for row in block}
        label = next((model.label for model in self.models if model.label == label), self._label())
        readings = [reading for reading in readings if self._wants(reading[0])]
        self._add(
            (Row(0, EXPORT, label, name, shape=shape, of=self._index.get((PARAMETER, label, name, ""))), Handed())
            for name, shape, *_ in readings
        )
        changes: list[Change] = []
        for name, _, key, storage in readings:
            row = self._index[EXPORT, label, name, ""]
            self._note(row, (*key, "parameter") if storage and storage in live else key, 0, changes)
        return merge(changes)

    def new_states(self) -> bool:
        """Whether an optimizer has made or dropped states since rows were last made for them."""
        return any(
            (optimizer := watch.optimizer()) is not None and len(optimizer.state) != watch.known
            for watch in self._optimizers
        )

    def forget_states(self) -> None:
        """Looks for new parts of optimizer state at the next reading."""
        for watch in self._optimizers:
            watch.known = -1

    def _find_gradients(self) -> None:
        for kind, block in list(self._blocks):
            if kind != PARAMETER:
                continue
            first = self.rows[block[0]]
            if (GRADIENT, first.model, first.name, "") in self._index:
                continue
            if any_gradient(self._entries[block.start : block.stop]):
                rows = [self.rows[row] for row in block]
                self._add(
                    (Row(0, GRADIENT, r.model, r.name, shape=r.shape, of=r.id), Gradient(self._entries[r.id]))
                    for r in rows
                )

    def _find_states(self) -> None:
        for number, watch in enumerate(self._optimizers):
            optimizer = watch.optimizer()
            if optimizer is None or len(optimizer.state) == watch.known:
                continue
            watch.known = len(optimizer.state)
            prefix = f"{number + 1}:" if number else ""
            found: list[tuple[Row, Any]] = []
            for kind, block in self._blocks:
                if kind == PARAMETER:
                    for row in block:
                        found += states(watch, optimizer, self.rows[row], self._entries[row], prefix)
            self._add(found)
