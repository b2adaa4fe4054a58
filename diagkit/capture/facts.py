"""Reads what is true of FSDP2 groups, optimizers and engines: everything but tensors."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from diagkit import torch_internals as internals
from diagkit.trace.schema import EngineFacts, GroupFacts, OptimizerFacts

#: An engine's own flags, as verl's engines name them.
ENGINE_FLAGS = {
    "uses_policy_flag": "_uses_fsdp2_cpu_offload_policy",
    "offload_param": "_is_offload_param",
    "offload_optimizer": "_is_offload_optimizer",
}


def nowhere() -> None:
    """In place of a weak reference to what has left the model."""


@dataclass(slots=True)
class GroupWatch:
    """One FSDP2 parameter group, its fixed part read once. A root without parameters of its own has no group."""

    state: Callable[[], Any]
    group: weakref.ref[Any] | None
    fixed: dict[str, Any] | None = None
    last: tuple[Any, ...] | None = None
    facts: GroupFacts | None = None
    stale: bool = False  # an optimizer has written its parameters while they were gathered
    sharded: Any = field(default_factory=internals.sharded)

    def leave(self) -> None:
        """The model has no such group any more."""
        self.state = nowhere

    @property
    def initialised(self) -> bool:
        """Whether lazy init was done when last read: it stays so, unless the root mark is taken away again."""
        return self.last is not None and self.last[4] is not None and self.last[5] == "done"

    @property
    def gathered(self) -> bool:
        """Whether its parameters are gathered now."""
        group = None if self.group is None else self.group()
        state = getattr(group, "_sharded_state", None)
        return state is not None and state is not self.sharded

    def has_gradients(self, trained: set[int]) -> bool:
        """Whether one of its parameters is among these (ids) and has a gradient."""
        group = None if self.group is None else self.group()
        params = [p.sharded_param for p in internals.group_params(group)]
        return any(id(p) in trained and p.grad is not None for p in params)

    def read(self) -> GroupFacts | None:
        """The group's facts now, None when it is gone. Never raises."""
        state = self.state()
        group = None if self.group is None else self.group()
        if state is None or (group is None and self.group is not None):
            return None
        try:
            root = state._is_root
            done = root is not None and self.initialised
            now = (
                None if group is None else group._sharded_state,
                *_passing(state, group or state),
                root,
                "done" if done else internals.lazy_init_state(state),
                self.stale,
            )
            if now != self.last or self.facts is None:
                if self.fixed is None:
                    self.fixed = {} if group is None else _fixed(group)
                sharded, training, pending, running, root, lazy, stale = now
                self.facts = GroupFacts(
                    **self.fixed,
                    sharded_state=internals.enum_name(sharded),
                    training_state=internals.enum_name(training),
                    root=root,
                    lazy_init=lazy,
                    backward_pending=pending,
                    backward_running=running,
                    stale=stale,
                )
                self.last = now
        except Exception as error:
            return GroupFacts(unreadable=f"{type(error).__name__}: {error}, on torch {torch.__version__}"[:200])
        return self.facts


def _passing(state: Any, group: Any) -> tuple[Any, bool, bool]:
    """Training state, whether the final callback is queued, and whether a backward pass is running in any thread.

    What seems to be broken off is read twice: the pass may have come to its end between two readings.
    """
    for _ in range(2):
        training, pending = group._training_state, internals.backward_pending(state)
        running = internals.backward_running()
        broken = not running and (pending or internals.enum_name(training) == "post_backward")
        if not broken or (running := internals.backward_elsewhere()):
            break
    return training, pending, running


def _fixed(group: Any) -> dict[str, Any]:
    policy = internals.policy_of(group)
    offload = internals.is_cpu_offload(policy)
    mesh = internals.group_mesh(group)
    return {
        "offload": offload,
        "pin_memory": offload and bool(getattr(policy, "pin_memory", False)),
        "policy": type(policy).__name__,
        "policy_flags": _policy_flags(policy),
        "device": str(group.device),
        "mesh": internals.mesh_text(mesh),
        "mesh_device": internals.mesh_device(mesh),
        "mesh_size": internals.mesh_size(mesh),
        "backends": internals.mesh_backends(mesh),
        "parameters": len(internals.group_params(group)),
    }


def _policy_flags(policy: object) -> str:
    """Fields beyond those of torch 2.13, as text."""
    if not is_dataclass(policy):
        return ""
    return ", ".join(f"{f.name}={getattr(policy, f.name)!r}" for f in fields(policy) if f.name != "pin_memory")[:200]


@dataclass(slots=True)
class OptimizerWatch:
    """One optimizer."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    live: Callable[[], Iterable[Iterable[torch.Tensor]]]  # the parameters of the watched models, model by model
    trained: Callable[[], set[int]]  # ids of the parameters that any watched optimizer holds
    known: int = -1  # entries of its state when rows were last made
    held: Any = None  # what a glance at its whole state showed last (`glance`) ...
    changes: int = 0  # ... how often that was something new ...
    looked: bool = False  # ... and whether this reading has looked
    _slot: Any = None  # the slot asked for last, and its state: parts of one parameter are read one after another
    _state: Any = None
    _seen: tuple[list[int], list[list[tuple[int, bool]]]] = ([], [])  # ids of its and of the live parameters last time
    _facts: OptimizerFacts | None = None

    def state_of(self, slot: Any) -> Any | None:
        """The state of the parameter in this slot, None where there is none. `forget` must follow before long."""
        if slot is not self._slot:
            optimizer, parameter = self.optimizer(), slot.tensor()
            # `state` is a defaultdict: asking must not add to it.
            self._state = None if optimizer is None or parameter is None else optimizer.state.get(parameter)
            self._slot = slot
        return self._state

    def forget(self) -> None:
        """The reading is over: lets go of the state asked for last, and looks again next time."""
        self._slot = self._state = None
        self.looked = False

    def read(self) -> OptimizerFacts | None:
        """Its facts against the live parameters; None when it is gone.

        A parameter that it misses is one of a model that it trains otherwise, or of any where it trains none.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return None
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        live = [[(id(p), p.requires_grad) for p in model] for model in self.live()]
        if self._facts is not None and not self._facts.dead and (listed, live) == self._seen:
            return self._facts
        held = set(listed)
        alive: set[int] = set()
        its: set[int] = set()
        others: set[int] = set()
        for model in live:
            here = {p for p, _ in model}
            trainable = {p for p, wants_grad in model if wants_grad}
            (others if held.isdisjoint(here) else its).update(trainable)
            alive |= here
        dead = held - alive
        options = optimizer.defaults
        foreach = options.get("foreach")
        self._seen = listed, live
        self._facts = OptimizerFacts(
            type=type(optimizer).__name__,
            parameters=len(held),
            dead=len(dead),
            missing=len((others if held.isdisjoint(alive) else its) - held),
            orphans=self._orphans(optimizer, dead) if dead else 0,
            fused=bool(options.get("fused")),
            foreach=foreach if isinstance(foreach, bool) else None,
            capturable=bool(options.get("capturable")),
        )
        return self._facts

    def _orphans(self, optimizer: torch.optim.Optimizer, dead: set[int]) -> int:
        """How many of the dead stand for a sharded parameter that nobody trains: of its shape, and of no model."""
        sharded = {id(p) for p in internals.all_sharded_parameters()}
        taken = sharded & self.trained()
        waiting = Counter(
            tuple(p.shape)
            for model in self.live()
            for p in model
            if p.requires_grad and id(p) in sharded and id(p) not in taken
        )
        lost = {id(p): tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) in dead}
        return sum((waiting & Counter(shape for p, shape in lost.items() if p not in sharded)).values())


class EngineWatch:
    """One engine, and what its class says; raises TypeError for an object that takes no weak reference."""

    def __init__(self, engine: object) -> None:
        self._engine = weakref.ref(engine)
        self._reads_flag = _names(type(engine), ENGINE_FLAGS["uses_policy_flag"])

    def watches(self, engine: object) -> bool:
        """Whether it is this one."""
        return self._engine() is engine

    def read(self) -> EngineFacts | None:
        """The engine's own offload flags as text, "missing" where it has none; None when it is gone."""
        engine = self._engine()
        if engine is None:
            return None
        values = {name: str(getattr(engine, attribute, "missing"))[:40] for name, attribute in ENGINE_FLAGS.items()}
        return EngineFacts(type=type(engine).__name__, reads_policy_flag=self._reads_flag, **values)


def _names(cls: type, attribute: str) -> bool:
    """Whether a method of the class names this attribute, plainly or as the text given to ``getattr``."""
    for owner in cls.__mro__:
        for method in vars(owner).values():
            code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
            if code is not None and (attribute in code.co_names or attribute in code.co_consts):
                return True
    return False
