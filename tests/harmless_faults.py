"""One small job, run again and again; each time one function of the recorder raises whenever it is called.

``python harmless_faults.py OUT SHARE SHARES`` takes every SHARES-th function, from SHARE on, and prints the names of
all functions that the job calls and, by function of the share, what became of the job and what its trace told.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pathlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harmless_training import digest
from recorder_world import begin, end, sharded, train_step
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import diagkit as dk
from diagkit import capture
from diagkit.capture import cause, hooks
from diagkit.trace import open_trace
from diagkit.trace.schema import Residency

#: Modules whose every function is made to fail in turn; what only wraps an engine has tests of its own.
MODULES = [
    *(f"diagkit.capture.{m.name}" for m in pkgutil.iter_modules(capture.__path__)),
    "diagkit.trace.writer",
    "diagkit.trace.sinks",
    "diagkit.torch_internals",
]
APART = {"diagkit.capture.attach", "diagkit.capture.follow", "diagkit.capture.parts", "diagkit.capture.glance"}
#: What the user calls, and the one place where faults end: their bodies are the shield itself.
SHIELD = {
    *(f"Recorder.{name}" for name in ("_safely", "phase", "mark", "watch", "close", "exported", "observe")),
    *(f"Recorder.{name}" for name in ("_close", "_shielded", "_deaf")),
    *("start", "kinds_of", "_writer", "_header", "TraceWriter._emit"),
    *("_confess", "_stepped", "_registered", "Tap._tell"),
}


class Injected(Exception):
    """A fault of ours."""


class Engine:
    """With the flags that an engine has."""

    _uses_fsdp2_cpu_offload_policy = True


def functions() -> Iterator[tuple[str, Any, str]]:
    """``(name, owner, attribute)`` of each function that can be made to fail."""
    for module_name in MODULES:
        if module_name in APART:
            continue
        module = importlib.import_module(module_name)
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module_name:
                continue
            if inspect.isfunction(value) and name not in SHIELD:
                yield f"{module_name}.{name}", module, name
            elif inspect.isclass(value) and not getattr(value, "_is_protocol", False):
                for method, thing in list(vars(value).items()):
                    plain = isinstance(thing, (types.FunctionType, staticmethod, classmethod, property))
                    if plain and not method.startswith("__") and f"{name}.{method}" not in SHIELD:
                        yield f"{module_name}.{name}.{method}", value, method


def code_of(thing: Any) -> Any:
    """The code object of a function, method or property."""
    function = getattr(thing, "__func__", None) or getattr(thing, "fget", None) or thing
    return getattr(inspect.unwrap(function), "__code__", None)


@contextlib.contextmanager
def failing(owner: Any, name: str) -> Iterator[list[int]]:
    """Inside, the function raises whenever it is called. Yields how often that was."""
    thing = vars(owner)[name]
    calls = [0]

    def raising(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        raise Injected(name)

    put: Any = raising
    if isinstance(thing, staticmethod):
        put = staticmethod(raising)
    elif isinstance(thing, classmethod):
        put = classmethod(raising)
    elif isinstance(thing, property):
        put = property(raising)
    if inspect.isfunction(thing) and not hasattr(thing, "__wrapped__") and not thing.__code__.co_freevars:
        change = exchanging_code(thing, raising)
    else:
        change = exchanging_names(owner, name, thing, put)
    with change:
        yield calls


@contextlib.contextmanager
def exchanging_code(function: types.FunctionType, raising: Callable[..., Any]) -> Iterator[None]:
    """Reaches whoever holds the function, a table or a patch made long before, too."""

    def planted(*args: Any, _raising: Callable[..., Any], **kwargs: Any) -> Any:
        return _raising()

    code, defaults = function.__code__, function.__kwdefaults__
    function.__code__, function.__kwdefaults__ = planted.__code__, {"_raising": raising}
    try:
        yield
    finally:
        function.__code__, function.__kwdefaults__ = code, defaults


@contextlib.contextmanager
def exchanging_names(owner: Any, name: str, thing: Any, put: Any) -> Iterator[None]:
    """Reaches whoever finds it by name, wherever it was imported."""
    places = [(owner, name)]
    if inspect.ismodule(owner):
        for module in [m for n, m in sys.modules.items() if n.startswith("diagkit.")]:
            places += [(module, key) for key, value in vars(module).items() if value is thing and module is not owner]
    for place, key in places:
        setattr(place, key, put)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, thing)


def job(folder: pathlib.Path | None) -> tuple[str, list[str]]:
    """Digest of what the job computed, and what it met on its way."""
    model = sharded(seed=5, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine()
    met: list[str] = []
    exported = []
    recording: Any = contextlib.nullcontext() if folder is None else dk.record(model, out=folder, detail="full")
    with recording as rec:
        phase = (lambda name: contextlib.nullcontext()) if folder is None else rec.phase
        if folder is not None:
            rec.watch(None, optimizer, engine)
        with phase("train"):
            losses = [train_step(model, optimizer).item()]
        with phase("save"):
            states = get_model_state_dict(model)
            saved = digest([states, optimizer.state_dict()])
            set_model_state_dict(model, states)
            optimizer.load_state_dict(optimizer.state_dict())
        with phase("adapt"):
            model.register_buffer("extra", torch.ones(3))
            model.model.norm.to(torch.float32)
        with phase("export"):
            pairs = ((name, tensor.full_tensor()) for name, tensor in states.items() if hasattr(tensor, "full_tensor"))
            for name, tensor in pairs if folder is None else rec.exported(pairs):
                exported.append(digest([name, tensor]))
        try:
            with phase("bad"):
                model.load_state_dict({"nonsense": torch.ones(1)})
        except RuntimeError as error:
            met.append(type(error).__name__ + str(error)[:60])
        try:
            with phase("worse"):
                raise KeyError("the job's own")
        except KeyError as error:
            met.append(str(error))
        with phase("move"):
            model.to("npu")
            met.append(str(model.lm_head.weight.device))
            model.cpu()
        if folder is not None:
            rec.mark("last")
    met.append(digest([losses, saved, exported, dict(model.named_parameters()), optimizer.state_dict()]))
    return met[-1], met


def moved(trace: Any) -> bool:
    """Whether the trace still tells that the move split the parameters."""
    return any(
        isinstance(trace.facts[number], Residency) and trace.facts[number].split
        for moment in trace.moments
        for number in {trace.state(moment).facts[row.id] for row in trace.rows if row.kind == "parameter"}
    )


def main(folder_name: str, share: int, shares: int) -> None:
    begin()
    folder = pathlib.Path(folder_name)
    hooks.install()
    hooks.uninstall()
    before = {key: patch.owner.__dict__[patch.name] for key, patch in hooks._patches.items()}
    plain = job(None)
    called: set[Any] = set()
    sys.setprofile(lambda frame, event, arg: called.add(frame.f_code) if event == "call" else None)
    job(folder / "called")
    sys.setprofile(None)
    told: dict[str, Any] = {}
    used = [entry for entry in functions() if code_of(vars(entry[1])[entry[2]]) in called]
    for number, (name, owner, attribute) in enumerate([("nothing", types, "none"), *used[share::shares]]):
        place = folder / f"{number:03d}"
        cause._known.clear()  # what an earlier job met would be told from memory
        report: dict[str, Any] = {"folder": place.name}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with contextlib.nullcontext([0]) if name == "nothing" else failing(owner, attribute) as calls:
                    result = job(place)
                report["same"] = result == plain
            except BaseException as error:
                report["reached"] = f"{type(error).__name__}: {error}"
        report["calls"] = calls[0]
        report["warned"] = [str(w.message) for w in warned if "diagkit" in str(w.message)]
        after = {key: patch.owner.__dict__[patch.name] for key, patch in hooks._patches.items()}
        report["left"] = [".".join(key) for key in before if after.get(key) is not before[key]]
        hooks._listeners = ()
        hooks.uninstall()
        with contextlib.suppress(Exception):
            trace = open_trace(place)[0]
            unread = [facts.unreadable for facts in trace.facts if getattr(facts, "unreadable", None)]
            unread += [trace.header.job["undescribed"]] if "undescribed" in trace.header.job else []
            report |= {"troubles": trace.troubles + unread, "problems": trace.problems, "moved": moved(trace)}
        told[name] = report
    end()
    print(json.dumps({"used": [name for name, _, _ in used], "told": told}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
