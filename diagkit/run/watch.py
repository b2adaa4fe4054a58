"""Finds FSDP2 models, optimizers and engines as a job makes them, and records them.

It listens where FSDP2 makes its parameter groups and where optimizers are made, so that it does not matter by which
name the job imported ``fully_shard``. Models are taken in at the first observed call after sharding: by then the root
is known. A rank without FSDP2 leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture import hooks
from diagkit.capture.attachment import Attachment, attach
from diagkit.capture.begin import start
from diagkit.capture.hooks import Call
from diagkit.capture.meeting import run_name
from diagkit.capture.operations import BUILD, SHARD, Operation
from diagkit.capture.parts import outermost
from diagkit.capture.recorder import Recorder
from diagkit.run.engines import making, role_of
from diagkit.run.options import Options
from diagkit.run.quiet import QuietWatch

Told = Callable[[BaseException], None]


class Watch:
    """Listens for models in this process; ``recorder`` is None until one was found on a rank that is recorded."""

    full = False

    def __init__(self, options: Options, on_failure: Told | None = None) -> None:
        self.options = options
        self.recorder: Recorder | None = None
        # An engine holds its attachment, and goes when the job lets it go.
        self.attached: weakref.WeakSet[Attachment] = weakref.WeakSet()
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._pending = False
        self._left_out = False
        self._parents: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._early: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._quiet: QuietWatch | None = None

    def begin(self, forked: bool = False) -> None:
        """Listens from now on. In a ``forked`` child the models that are there are the parent's, and not watched."""
        hooks.add(self)
        if forked:
            self._parents.update(internals.all_fsdp_modules())
        else:
            # What made us begin may be under way: the first group of the first model.
            self._pending = True

    def end(self, reason: str = "closed") -> None:
        """Takes everything out again and closes the trace. A second time is harmless."""
        hooks.remove(self)
        if os.getpid() != self._pid:
            return
        if self._quiet is not None:
            self._quiet.stop()
        for attachment in list(self.attached):
            with contextlib.suppress(Exception):
                attachment.detach()
        self.attached.clear()
        if self.recorder is not None:
            self.recorder.close(reason)
        atexit.unregister(self.end)

    # ---- what hooks.py tells (its Listener)

    def wants(self, operation: Operation, subject: object) -> bool:
        """Whether a call may bring something new."""
        if self._left_out or os.getpid() != self._pid:
            return False
        return operation is SHARD or operation is BUILD or self._pending

    def before(self, call: Call) -> None:
        """Takes in what was sharded before this call, and lets the recorder hear of the call itself."""
        if call.operation in (SHARD, BUILD) or not self._pending:
            return
        with self._lock:
            self._settle(call.subject)
        recorder = self.recorder
        if (
            recorder is not None
            and recorder not in call.heard(call.operation)
            and recorder.wants(call.operation, call.subject)
        ):
            call.told = (*call.told, recorder)
            recorder.before(call)

    def after(self, call: Call) -> None:
        """Notes what was made."""
        if call.operation is SHARD:
            self._pending = True
        elif call.operation is BUILD and isinstance(call.subject, torch.optim.Optimizer):
            self._early.add(call.subject)
            with self._lock:
                if self._pending:
                    self._settle(None)
                self._take_optimizers()

    def failed(self, call: Call, error: BaseException) -> None:
        """Nothing was made."""

    def registered(self, module: nn.Module) -> None:
        """The recorder hears of it itself."""

    def trouble(self, where: str, error: BaseException) -> None:
        """Tells a fault of our own, where there is somebody to tell."""
        if self.recorder is not None:
            self.recorder.trouble(where, error)

    # ---- taking in

    def ready(self) -> Recorder | None:
        """The recorder, begun now if need be; None on a rank that is left out, or whose rank cannot be known yet."""
        with self._lock:
            if self.recorder is None and not self._left_out:
                self._start()
            return self.recorder

    def engine(self, engine: Any, operations: dict[str, str] | None = None) -> None:
        """Watches an engine that was just made."""
        if self._left_out or any(a.engine is engine for a in self.attached):
            return
        label = role_of(engine)
        found = attach(engine, recorder=self.ready, label=label, operations=operations, on_failure=self._on_failure)
        self.attached.add(found)

    def _start(self) -> None:
        rank, world = internals.rank_and_world()
        if not self.options.records(rank):
            self._left_out = True
            hooks.remove(self)
            return
        if world > 1 and internals.default_store() is None and not os.environ.get("DIAGKIT_RUN"):
            return  # the ranks could not agree on a folder: wait for the process group
        name = run_name()
        options = self.options
        self.recorder = start(
            None,
            out=Path(options.out or "runs") / name,
            detail=options.detail,
            run=name,
            job=options.told(),
            wants=options.wants,
            limit=options.limit,
        )
        atexit.register(self.end)
        if options.quiet:
            self._quiet = QuietWatch(self.recorder, options.quiet)
            self._quiet.start()

    def _settle(self, subject: object) -> None:
        """Watches the models that have been sharded since the last time."""
        self._pending = False
        known = self.recorder
        modules = [
            m
            for m in internals.all_fsdp_modules()
            if m not in self._parents and (known is None or not known.watches(m))
        ]
        roots = _roots(modules, subject)
        recorder = self.ready() if roots else None
        if recorder is None:
            self._pending = not self._left_out
            return
        if known is None:
            # Optimizers that were made before there was anything to listen to. One look through the process.
            self._early.update(o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
        for root in roots:
            recorder.watch({self._label(root): root})
            self._roots.append(weakref.ref(root))
        self._take_optimizers()
        recorder.mark("model found")

    def _take_optimizers(self) -> None:
        """Watches those that train a watched model; the others may yet turn out to."""
        roots = [root for ref in self._roots if (root := ref()) is not None]
        recorder = self.recorder
        for optimizer in list(self._early) if recorder is not None else ():
            if recorder is not None and _may_train(optimizer, roots):
                recorder.watch(optimizer=optimizer)
                self._early.discard(optimizer)

    def _label(self, root: nn.Module) -> str:
        """What the job calls a model: the role of the engine that is making it, or its variable's name."""
        working = next((a.label for a in self.attached if a.working), "")
        if making and not working:
            working = role_of(making[-1])
        return working or _name_of(root) or "model"


def _roots(modules: list[nn.Module], subject: object) -> list[nn.Module]:
    """The models that these FSDP2 modules belong to: as far up as is known."""
    roots = list(outermost({str(n): m for n, m in enumerate(modules)}).values())
    candidates: Iterable[nn.Module] = [subject] if isinstance(subject, nn.Module) else []
    if len(roots) > 1:
        # Layers that were sharded without their root: whoever holds them is the model. One look through the process.
        candidates = [*candidates, *(o for o in gc.get_objects() if issubclass(type(o), nn.Module))]
    holders = {}
    for module in candidates:
        with contextlib.suppress(Exception):  # one that is still being made
            if any(part is root for root in roots for part in module.modules() if part is not module):
                holders[str(id(module))] = module
    return list(outermost({**{str(id(r)): r for r in roots}, **holders}).values()) if holders else roots


def _may_train(optimizer: torch.optim.Optimizer, roots: list[nn.Module]) -> bool:
    """Whether an optimizer made before sharding was meant for one of these models: it holds its parameters, or as many
    as it has (those that sharding replaced)."""
    groups = getattr(optimizer, "param_groups", ())  # one that is being made has none yet
    held = [id(p) for group in groups for p in group["params"]]
    live = [[id(p) for p in root.parameters() if p.requires_grad] for root in roots]
    return any(len(held) == len(ids) or not set(held).isdisjoint(ids) for ids in live)


def _name_of(root: nn.Module) -> str:
    """The name of a variable that holds the model. Module variables only: reading a frame's own variables would keep
    them alive until Python 3.13."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        for name, value in list(frame.f_globals.items()):
            if value is root and not name.startswith("_"):
                return name
    return ""
