"""What is watched: models, their gradients, optimizers, engines.

Nothing watched is kept alive. Modules, FSDP2's records and optimizers are held by weak references; tensors not even
so, because PyTorch refuses to swap a tensor that has a weak reference (`torch.utils.swap_tensors`, which
``model.to()`` uses for DTensors): they are looked up in their module's slot every time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.changes import merge
from diagkit.capture.entries import Gradient, Handed, Slot
from diagkit.capture.facts import EngineWatch, GroupWatch, OptimizerWatch
from diagkit.capture.gathered import Gathered
from diagkit.capture.glance import any_gradient
from diagkit.capture.readings import Readings, Shape
from diagkit.capture.residency import Key, quiet
from diagkit.capture.subjects import module_of
from diagkit.capture.survey import Model, Survey, states, survey
from diagkit.trace.schema import (
    BUFFER,
    ENGINE,
    EXPORT,
    GRADIENT,
    GROUP,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    Change,
    Facts,
    Row,
)

#: Kinds of row read at each occasion.
EVERYTHING = frozenset((PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, EXPORT, GROUP, OPTIMIZER, ENGINE))
MODEL = frozenset((PARAMETER, BUFFER, GRADIENT, GROUP, OPTIMIZER))
STATES = frozenset((PARAMETER, OPTIMIZER_STATE, OPTIMIZER))  # a state is one of the parameter that is there now

#: An exported tensor: name, global shape, key, storage.
Exported = tuple[str, Shape, Key, int]


class Inventory:
    """What is watched, and its readings (of which ``define`` and ``number`` are told).

    ``wants`` says of a tensor's name whether it gets a row.
    """

    def __init__(
        self,
        define: Callable[[list[Row], list[Shape]], None],
        number: Callable[[Facts], int],
        wants: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.readings = Readings(define, number)
        self.models: list[Model] = []
        self.trainer = 0  # ident of the thread that trains, 0 while that is not known
        self.dirty = False  # a module, parameter or FSDP group was added somewhere: look again before the next reading
        self._wants = wants
        self._unlisted: dict[str, list[Slot]] = {}  # by model: parameters without a row, live all the same
        self._optimizers: list[OptimizerWatch] = []
        self.gathered = Gathered(self._groups, self.trained)

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
        watch = OptimizerWatch(weakref.ref(optimizer), self.live_parameters, self.trained)
        self._optimizers.append(watch)
        self.readings.forget_glances()  # what another optimizer seems to have lost this one may train
        n = len(self._optimizers)
        name, part = type(optimizer).__name__, "" if n == 1 else str(n)
        self.readings.add([(Row(0, OPTIMIZER, self._trained_by(optimizer), name, part=part), watch)])

    def add_engine(self, engine: object, label: str | None = None) -> None:
        """Watches an engine's own offload flags; an object without weak references is left alone."""
        model, name = label or self._label(), type(engine).__name__
        with contextlib.suppress(TypeError):
            for n in itertools.count(1):
                part = "" if n == 1 else str(n)
                known = self.readings.index.get((ENGINE, model, name, part))
                if known is not None and self.readings.entries[known].watches(engine):
                    return
                if known is None:
                    self.readings.add([(Row(0, ENGINE, model, name, part), EngineWatch(engine))])
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

    def _groups(self) -> Iterator[GroupWatch]:
        return (self.readings.entries[row] for row in self.readings.of(GROUP))

    def trained(self) -> set[int]:
        """Ids of the parameters that any watched optimizer holds."""
        held = (optimizer for watch in self._optimizers if (optimizer := watch.optimizer()) is not None)
        return {id(p) for optimizer in held for group in optimizer.param_groups for p in group["params"]}

    def _live(self, label: str) -> Iterator[torch.Tensor]:
        listed = (self.readings.entries[row] for row in self.readings.of(PARAMETER, label))
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
        try:
            with quiet():
                found = survey(root, model.label)
                model.names = found.names
                self.readings.faults += found.faults
                self._leave_out(found, model.label)
                there: set[tuple[str, str, str, str]] = set()
                for block in (found.parameters, found.buffers, found.groups):
                    there.update((row.kind, row.model, row.name, row.part) for row, _ in block)
                    self.readings.add(block)
            for key, row in self.readings.index.items():
                if key[0] in (PARAMETER, BUFFER, GROUP) and key[1] == model.label and key not in there:
                    self.readings.entries[row].leave()
        except BaseException as error:
            self.dirty = not isinstance(error, Exception)  # an interrupt by hand: the rest is taken in next time
            raise

    def _leave_out(self, found: Survey, label: str) -> None:
        self._unlisted[label] = [slot for row, slot in found.parameters if not self._wants(row.name)]
        if self._unlisted[label]:
            found.parameters = [pair for pair in found.parameters if self._wants(pair[0].name)]
        found.buffers = [pair for pair in found.buffers if self._wants(pair[0].name)]

    # ---- reading

    def scan(self, kinds: frozenset[str], afresh: bool = False, edge: bool = False) -> list[Change]:
        """Finds the rows of these kinds that came since, and reads all; what changed since they were last read.

        ``afresh`` and ``edge`` as for `Readings.scan`.
        """
        readings = self.readings
        if GRADIENT in kinds and not self._gradients_rest():
            kinds -= {GRADIENT}  # the next reading tells
        try:
            with quiet():
                # Parameters first: what else is read is theirs, and found faster where they have just been looked at.
                changes = readings.scan(kinds & {PARAMETER}, afresh, edge)
                if GRADIENT in kinds:
                    readings.shielded("gradients", self._find_gradients)
                if OPTIMIZER_STATE in kinds:
                    readings.shielded("optimizer states", self._find_states)
                return merge(changes + readings.scan(kinds - {PARAMETER}, afresh, edge))
        except BaseException:  # an interrupt by hand
            readings.forget_glances()
            raise
        finally:
            for watch in self._optimizers:
                readings.shielded("optimizers", watch.forget)

    def _gradients_rest(self) -> bool:
        """Whether ``.grad`` can be read. Autograd puts gradients into their parameters without Python's lock: who reads
        one while another thread is in backward may find memory that is free already, and the process ends. So only the
        thread that trains reads them, and those of the engine that are in its backward."""
        trains = threading.get_ident() == (self.trainer or threading.main_thread().ident)
        return internals.backward_running() or (trains and not internals.backward_elsewhere())

    def state(self, exchanged: set[int]) -> list[Change]:
        """The whole state as last read; ``exchanged``: rows whose storage was exchanged since the last moment."""
        return self.readings.state(exchanged)

    def exported(self, passed: list[Exported], label: str | None = None) -> tuple[dict[str, int], list[Change]]:
        """Makes rows for tensors that were handed out; the rows by name, and what changed by them."""
        readings = self.readings
        live = readings.storages(PARAMETER)
        label = next((model.label for model in self.models if model.label == label), self._label())
        passed = [one for one in passed if self._wants(one[0])]
        readings.add(
            (Row(0, EXPORT, label, name, shape=shape, of=readings.index.get((PARAMETER, label, name, ""))), Handed())
            for name, shape, *_ in passed
        )
        rows = {name: readings.index[EXPORT, label, name, ""] for name, *_ in passed}
        keys = {rows[name]: (*key, "parameter") if storage in live - {0} else key for name, _, key, storage in passed}
        return rows, self._hand(keys)

    def overtaken(self, exports: dict[int, Key], word: str) -> list[Change]:
        """These exports (key by row) are held, and their parameters went on without them; what changed by that.
        ``word`` as for `Residency.shares`."""
        for row in exports:
            self.readings.entries[row].stays = True
        return self._hand({row: (*key, word) for row, key in exports.items()})

    def copied(self, source: int, key: Key) -> tuple[int, list[Change]]:
        """A copy of this row's tensor went to the host; its row, and what changed by it."""
        readings = self.readings
        of = readings.rows[source]
        found = readings.index.get((EXPORT, of.model, of.name, "copy"))
        if found is None:
            block = next(block for _, block in readings.blocks if source in block)
            alike = [readings.rows[row] for row in block]
            readings.add((replace(row, kind=EXPORT, part="copy", of=row.of or row.id), Handed()) for row in alike)
            found = readings.index[EXPORT, of.model, of.name, "copy"]
        readings.entries[found].stays = False
        return found, self._hand({found: key})

    def arrived_late(self, row: int, key: Key) -> list[Change]:
        """The copy with this row was read before it had arrived; what changed by that."""
        self.readings.entries[row].stays = True
        return self._hand({row: key})

    def let_go(self, rows: Iterable[int]) -> None:
        """These exports are over: gone at the next reading."""
        for row in rows:
            if not self.readings.entries[row].stays:
                self.readings.entries[row].key = None

    def _hand(self, keys: dict[int, Key]) -> list[Change]:
        changes: list[Change] = []
        for row, key in keys.items():
            self.readings.entries[row].key = key
            self.readings.note(row, key, 0, changes)
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
        for kind, block in list(self.readings.blocks):
            if kind != PARAMETER:
                continue
            first = self.readings.rows[block[0]]
            if (GRADIENT, first.model, first.name, "") in self.readings.index:
                continue
            if any_gradient(self.readings.entries[block.start : block.stop]):
                rows = [self.readings.rows[row] for row in block]
                self.readings.add(
                    (Row(0, GRADIENT, r.model, r.name, shape=r.shape, of=r.id), Gradient(self.readings.entries[r.id]))
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
            for row in self.readings.of(PARAMETER):
                found += states(watch, optimizer, self.readings.rows[row], self.readings.entries[row], prefix)
            self.readings.add(found)
