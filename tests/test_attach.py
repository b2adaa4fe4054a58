"""`dk.attach`: engines of every make, their operations as phases, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import diagkit as dk
from diagkit.capture import Attachment
from diagkit.errors import UsageError
from diagkit.trace import RankTrace
from diagkit.trace.schema import EXPORT

Pair = namedtuple("Pair", "weights config")  # as a job's code may have it


class Engine:
    """Makes its model late, as engines do."""

    model: nn.Module | None = None

    def initialize(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def save_checkpoint(self, path: str) -> str:
        self.to("cpu")
        return f"saved to {path}"

    def to(self, device: str) -> Engine:
        assert self.model is not None
        self.model.to(device)
        return self

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.model is not None
        return ((name, tensor.detach()) for name, tensor in self.model.state_dict().items())

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[str]:
        self.to("cpu")
        yield "training"
        self.to("cpu")

    def train_batch(self) -> float:
        assert self.model is not None
        loss = self.model(torch.ones(1, 3)).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


class Child(Engine):
    def save_checkpoint(self, path: str) -> str:
        return super().save_checkpoint(path).upper()


class Slots:
    __slots__ = ("__weakref__", "model")

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)

    def save(self, path: str) -> str:
        return f"saved to {path}"

    def to(self, device: str) -> Slots:
        self.model.to(device)
        return self


class Handing(Engine):
    """Hands its save out through a property."""

    @property
    def save_checkpoint(self) -> Callable[[str], str]:  # type: ignore[override]
        return lambda path: f"saved to {path}"


class Strict(Engine):
    """Takes no attribute that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("model", "optimizer"):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Module(nn.Module):
    """A model that is its own engine, as Lightning's are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def save(self, path: str) -> str:
        self.train(self.training)
        return f"saved to {path}"


def loud(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return f"loud: {method(*args, **kwargs)}"

    return wrapped


def wrapped_engine() -> Engine:
    engine = Engine()
    engine.save_checkpoint = loud(engine.save_checkpoint)  # type: ignore[method-assign]
    return engine


def phases(trace: RankTrace) -> list[tuple[str, str, int]]:
    """Name, the engine's own operation, parent."""
    return [(p.name, p.label.rpartition(".")[2], p.parent) for p in trace.phases.values() if p.ordinal]


class Case(NamedTuple):
    make: Callable[[], Any]
    operation: str
    said: str
    phases: list[tuple[str, str, int]]


CASES = {
    "plain": Case(Engine, "save_checkpoint", "saved to x", [("save", "save_checkpoint", 0), ("move", "to", 1)]),
    "a subclass": Case(Child, "save_checkpoint", "SAVED TO X", [("save", "save_checkpoint", 0), ("move", "to", 1)]),
    "wrapped": Case(
        wrapped_engine, "save_checkpoint", "loud: saved to x", [("save", "save_checkpoint", 0), ("move", "to", 1)]
    ),
    "strict": Case(Strict, "save_checkpoint", "saved to x", [("save", "save_checkpoint", 0), ("move", "to", 1)]),
    "slots": Case(Slots, "save", "saved to x", [("save", "save", 0)]),
    "a property": Case(Handing, "save_checkpoint", "saved to x", [("save", "save_checkpoint", 0)]),
    "a module": Case(Module, "save", "saved to x", [("save", "save", 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_a_phase_and_the_engine_is_as_before_after_it(name: str) -> None:
    case = CASES[name]
    engine = case.make()
    if hasattr(engine, "initialize"):
        engine.initialize()
    own = dict(vars(engine)) if hasattr(engine, "__dict__") else {}
    cls = type(engine)
    attached = dk.attach(engine)
    assert getattr(engine, case.operation)("x") == case.said
    attached.detach()
    assert phases(attached.trace) == case.phases
    assert attached.trace.troubles == []
    assert type(engine) is cls
    if hasattr(engine, "__dict__"):
        assert vars(engine) == own
        assert all(vars(engine)[key] is value for key, value in own.items())
    assert getattr(engine, case.operation)("x") == case.said
    assert len(phases(attached.trace)) == len(case.phases)


def test_an_engine_that_is_attached_before_it_has_a_model_is_watched_from_its_initialisation_on() -> None:
    engine = Engine()
    with dk.attach(engine, label="actor") as attached:
        engine.initialize()
        engine.train_batch()
    trace = attached.trace
    assert trace.phases[1].name == "init"
    assert {(row.model, row.name) for row in trace.rows if row.kind == "parameter"} == {
        ("actor", "weight"),
        ("actor", "bias"),
    }
    assert {row.kind: row.model for row in trace.rows if row.kind in ("engine", "optimizer")} == {
        "engine": "actor",
        "optimizer": "actor",
    }
    assert trace.phases[2].calls["Optimizer.step"] == 1


def test_a_context_is_a_phase_for_as_long_as_its_block_runs() -> None:
    engine = Engine()
    engine.initialize()
    with dk.attach(engine) as attached:
        with engine.train_mode() as word:
            assert word == "training"
            engine.train_batch()
        with pytest.raises(ValueError, match="in the block"), engine.train_mode():
            raise ValueError("in the block")
    found = phases(attached.trace)
    assert found[:4] == [("train", "train_mode", 0), ("move", "to", 1), ("train", "train_batch", 1), ("move", "to", 1)]
    failed = [phase for phase in attached.trace.phases.values() if phase.failed]
    assert [phase.label for phase in failed] == ["Engine.train_mode"]
    assert attached.trace.failures[0].failure is not None
    assert attached.trace.failures[0].failure.message == "in the block"


HANDED: dict[str, Callable[[Iterator[Any]], Any]] = {
    "alone": lambda generator: generator,
    "in a tuple": lambda generator: (generator, {"rank": 8}),
    "in a named tuple": lambda generator: Pair(generator, None),
    "in a list": lambda generator: [generator, None],
    "in a dict": lambda generator: {"weights": generator},
    "as a map": lambda generator: map(tuple, generator),
}


def taken_out(handed: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(handed, dict):
        return handed["weights"]  # type: ignore[no-any-return]
    return handed[0] if isinstance(handed, (tuple, list)) else handed  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", HANDED)
def test_a_generator_is_followed_until_it_is_consumed_and_keeps_nothing(how: str) -> None:
    class Handing(Engine):
        def export(self) -> Any:
            return HANDED[how](super().export())

    engine = Handing()
    engine.initialize()
    with dk.attach(engine) as attached:
        handed = engine.export()
        assert type(handed) is type(HANDED[how](iter(()))) or how in ("alone", "as a map")
        before = len(attached.trace.moments)
        seen = []
        for name, tensor in taken_out(handed):
            seen.append((name, weakref.ref(tensor)))
            del tensor
            assert seen[-1][1]() is None, "kept alive by the one who watches"
    assert [name for name, _ in seen] == ["weight", "bias"]
    trace = attached.trace
    assert phases(trace) == [("export", "export", 0), ("export", "export: consumed", 0)]
    assert len(trace.moments) > before
    assert [row.name for row in trace.rows if row.kind == EXPORT] == ["weight", "bias"]


def test_what_is_yielded_is_left_as_it_is_whatever_it_is() -> None:
    class Odd(Engine):
        def export(self) -> Any:
            return iter([1, ("a", 2, 3), ("b", torch.ones(2)), "text"])

        def load(self) -> Any:
            return open(__file__)

    engine = Odd()
    engine.initialize()
    with dk.attach(engine) as attached:
        assert [type(thing).__name__ for thing in engine.export()] == ["int", "tuple", "tuple", "str"]
        with engine.load() as file:
            assert file.name == __file__
    assert attached.trace.troubles == []


def test_a_generator_that_fails_or_is_left_ends_its_phase() -> None:
    class Failing(Engine):
        def export(self) -> Iterator[Any]:
            yield "a", torch.ones(2)
            raise RuntimeError("No backend type associated with device type cpu")

    engine = Failing()
    engine.initialize()
    with dk.attach(engine) as attached:
        with pytest.raises(RuntimeError, match="No backend"):
            list(engine.export())
        generator = engine.export()
        next(generator)
        generator.close()  # type: ignore[attr-defined]
        engine.export()
    found = attached.trace.phases
    assert [found[n].failed for n in (1, 2, 3, 4, 5)] == [False, True, False, False, False]
    assert all(phase.exit is not None for phase in found.values() if phase.ordinal)


def test_a_coroutine_runs_inside_its_phase() -> None:
    class Asynchronous(Engine):
        async def save(self, path: str) -> str:
            await asyncio.sleep(0)
            return self.save_checkpoint(path)

    engine = Asynchronous()
    engine.initialize()
    with dk.attach(engine) as attached:
        assert asyncio.run(engine.save("x")) == "saved to x"
    assert phases(attached.trace)[:2] == [("save", "save", 0), ("save", "save_checkpoint", 1)]


def test_operations_of_other_names_are_told_by_a_mapping() -> None:
    class Other:
        def dump(self) -> int:
            return 3

    with dk.attach(Other(), operations={"dump": "save"}) as attached:
        assert attached.engine.dump() == 3
    assert phases(attached.trace) == [("save", "dump", 0)]


@pytest.mark.parametrize(
    ("engine", "operations", "said"),
    [
        (
            object(),
            None,
            "nothing to attach to: found object, expected an object with a method such as",
        ),
        (Engine(), {"dump": "save"}, "the engine has no such operation: found dump (at Engine)"),
    ],
)
def test_what_is_no_engine_is_told_so(engine: object, operations: dict[str, str] | None, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        dk.attach(engine, operations=operations)
    assert str(raised.value).startswith(said)


def test_a_wrapper_that_came_later_stays_and_ours_beneath_it_sleeps() -> None:
    engine = Engine()
    engine.initialize()
    attached = dk.attach(engine)
    engine.save_checkpoint = theirs = loud(engine.save_checkpoint)  # type: ignore[method-assign]
    attached.detach()
    assert engine.save_checkpoint is theirs
    assert engine.save_checkpoint("x") == "loud: saved to x"
    assert phases(attached.trace) == []


def test_two_attachments_leave_in_any_order() -> None:
    for first in (0, 1):
        engine = Engine()
        engine.initialize()
        both = [dk.attach(engine), dk.attach(engine)]
        engine.save_checkpoint("x")
        both[first].detach()
        both[1 - first].detach()
        assert engine.save_checkpoint("x") == "saved to x"
        assert [len(phases(attached.trace)) for attached in both] == [2, 2]


def test_detaching_twice_is_harmless() -> None:
    engine = Engine()
    attached = dk.attach(engine)
    attached.detach()
    attached.detach()
    assert repr(attached).startswith("<Attachment detached from Engine: ")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_a_copy_of_the_engine_is_not_watched(duplicate: Callable[[Engine], Engine]) -> None:
    engine = Child()
    with dk.attach(engine) as attached:
        other = duplicate(engine)
        other.initialize()
        assert other.save_checkpoint("x") == "SAVED TO X"
        assert other.save_checkpoint.__self__ is other  # type: ignore[attr-defined]
    assert phases(attached.trace) == []


def test_an_engine_goes_when_its_job_lets_it_go() -> None:
    engine = Engine()
    engine.initialize()
    attached: Attachment | None = dk.attach(engine)
    engine.save_checkpoint("x")
    gone = weakref.ref(engine)
    assert attached is not None
    attached.detach()
    del engine, attached
    gc.collect()
    assert gone() is None


def test_engines_of_one_class_in_one_recorder_are_told_apart(tmp_path: Any) -> None:
    actor, ref = Engine(), Engine()
    with dk.attach(actor, out=tmp_path, label="actor") as attached:
        second = dk.attach(ref, recorder=attached.recorder, label="ref")
        actor.initialize()
        ref.initialize()
        actor.train_batch()
        second.detach()
    trace = dk.open_trace(tmp_path)[0]
    assert {row.model for row in trace.rows} == {"actor", "ref"}
    assert [(row.kind, row.model) for row in trace.rows if row.kind in ("engine", "optimizer")] == [
        ("engine", "actor"),
        ("engine", "ref"),
        ("optimizer", "actor"),
        ("optimizer", "ref"),
    ]
    facts = [trace.facts[trace.state(-1).facts[row.id]] for row in trace.rows if row.kind == "optimizer"]
    assert [(one.dead, one.missing) for one in facts] == [(0, 0), (0, 0)]  # type: ignore[union-attr]
