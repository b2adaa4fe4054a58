"""What recording leaves behind in PyTorch and in the process: nothing. On the CPU, in this process, with real torch."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.modules import module as modules  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import diagkit as dk  # noqa: E402
from diagkit.capture import Recorder, begin, hooks, start  # noqa: E402
from diagkit.errors import TraceError, UsageError  # noqa: E402
from diagkit.trace import RankTrace, open_trace, read_rank  # noqa: E402
from diagkit.trace.schema import BUFFER, CALL, FAILURE, GRADIENT, OPTIMIZER_STATE, PARAMETER  # noqa: E402
from diagkit.trace.writer import TraceWriter  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACES = [
    (nn.Module, "_apply"),
    (nn.Module, "state_dict"),
    (nn.Module, "load_state_dict"),
    (torch.optim.Optimizer, "__init__"),
    (torch.optim.Optimizer, "state_dict"),
    (torch.optim.Optimizer, "load_state_dict"),
]
GLOBAL_HOOKS: list[Callable[[], Any]] = [
    lambda: modules._global_module_registration_hooks,
    lambda: modules._global_parameter_registration_hooks,
    lambda: modules._global_buffer_registration_hooks,
    lambda: optimizers._global_optimizer_pre_hooks,
    lambda: optimizers._global_optimizer_post_hooks,
    lambda: modules._global_forward_hooks,
    lambda: modules._global_forward_pre_hooks,
    lambda: modules._global_backward_hooks,
    lambda: modules._global_backward_pre_hooks,
]


def attributes() -> list[object]:
    return [vars(owner)[name] for owner, name in PLACES]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Before and after every test PyTorch is as it came."""
    before = attributes()
    yield
    assert all(now is then for now, then in zip(attributes(), before, strict=True))
    assert [len(dictionary()) for dictionary in GLOBAL_HOOKS] == [0] * len(GLOBAL_HOOKS)
    assert hooks._listeners == () and getattr(hooks._here, "call", None) is None


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def step(model: nn.Module, optimizer: Any, batch: Any = None) -> Any:
    loss = model(torch.ones(3, 4) if batch is None else batch).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def memory(model: Any, optimizer: Any = None, **more: Any) -> Recorder:
    return start(model, optimizer, out=None, **more)


def trace_of(recorder: Recorder) -> RankTrace:
    recorder.close()
    return read_rank(recorder.lines)


# ---- in and out


def test_while_recorded_it_is_ours_and_afterwards_the_identical_object() -> None:
    before = attributes()
    recorder = memory(small())
    assert not any(now is then for now, then in zip(attributes(), before, strict=True))
    recorder.close()
    recorder.close()  # a second time is harmless
    assert all(now is then for now, then in zip(attributes(), before, strict=True))


def test_an_exception_that_leaves_the_recording_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError), dk.record(small(), out=tmp_path) as rec, rec.phase("train"):
        raise ZeroDivisionError
    trace = open_trace(tmp_path)[0]
    assert trace.problems == [] and [m.failure.type for m in trace.failures if m.failure] == ["ZeroDivisionError"]


def tagged(original: Any, wraps: bool) -> Any:
    """Another tool's wrapper, made the polite way or not."""

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return original(*args, **kwargs)

    return functools.wraps(original)(theirs) if wraps else theirs


seen: list[str] = []


@pytest.mark.parametrize("wraps", [True, False], ids=["functools.wraps", "a bare function"])
def test_what_another_tool_put_over_ours_stays_and_ours_is_inert(wraps: bool) -> None:
    model, original = small(), vars(nn.Module)["_apply"]
    recorder = memory(model)
    theirs = tagged(vars(nn.Module)["_apply"], wraps)
    nn.Module._apply = theirs  # type: ignore[method-assign]
    try:
        recorder.close()
        lines = len(recorder.lines)
        seen.clear()
        assert vars(nn.Module)["_apply"] is theirs
        model.double()
        assert len(seen) >= 1 and len(recorder.lines) == lines

        # Again and again: heard once each time, never wrapped twice.
        for _ in range(3):
            again = memory(model)
            model.float()
            trace = trace_of(again)
            assert [m.label for m in trace.moments] == ["start", "Module.float", "end"]
            assert vars(nn.Module)["_apply"] is theirs
            model.double()
        assert depth(vars(nn.Module)["_apply"]) <= 2

        # Theirs goes and brings ours to light: a later recording still ends with PyTorch's own.
        ours = theirs.__closure__[0].cell_contents
        nn.Module._apply = ours  # type: ignore[method-assign]
        last = memory(model)
        model.float()
        assert [m.label for m in trace_of(last).moments] == ["start", "Module.float", "end"]
        assert vars(nn.Module)["_apply"] is original
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def depth(function: Any) -> int:
    """Wrappers around wrappers, by their closures."""
    count = 0
    while function is not None and count < 50:
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = next((value for value in cells if callable(value) and hasattr(value, "__closure__")), None)
        count += function is not None
    return count


def test_hooks_stay_while_one_recorder_is_left_whatever_the_order() -> None:
    first_model, second_model = small(1), small(2)
    first, second = memory(first_model), memory(second_model)
    first_model.double()
    second_model.double()
    first.close()
    second_model.float()
    moments = [[m.label for m in trace_of(r).moments] for r in (first, second)]
    assert moments == [["start", "Module.double", "end"], ["start", "Module.double", "Module.float", "end"]]


def test_two_recorders_of_one_model_tell_the_same() -> None:
    model = small()
    outer = memory(model)
    with outer.phase("outer"):
        inner = memory(model)
        with inner.phase("inner"):
            model.double()
        inner.close()
        model.float()
    told = [[f"{m.phase} {m.label}" for m in trace_of(r).moments] for r in (inner, outer)]
    assert told[0] == ["0 start", "1 inner: enter", "1 Module.double", "1 inner: exit", "0 end"]
    assert told[1] == ["0 start", "1 outer: enter", "1 Module.double", "1 Module.float", "1 outer: exit", "0 end"]


def test_a_recorder_of_a_part_hears_of_moves_of_the_whole() -> None:
    model = small()
    whole, part = memory(model), memory(model[2])
    model.double()
    rows = {t.rows[0].name: len(t.rows) for t in trace_of(part).transitions()}
    assert rows == {"weight": 2}
    assert [m.label for m in trace_of(whole).moments] == ["start", "Module.double", "end"]


def test_after_closing_nothing_is_recorded_and_nothing_put_in() -> None:
    model = small()
    recorder = memory(model)
    recorder.close()
    lines = list(recorder.lines)
    with recorder.phase("late"):
        model.double()
        recorder.mark("late")
        recorder.watch(small())
    assert [name for name, _ in recorder.exported([("a", torch.ones(1))])] == ["a"]
    assert recorder.lines == lines


def test_the_caller_is_named_and_not_the_wrapper_or_override_in_between() -> None:
    class Own(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return super()._apply(fn, recurse)

    model = Own(2, 2)
    original = vars(nn.Module)["_apply"]
    first = memory(model)
    nn.Module._apply = tagged(vars(nn.Module)["_apply"], wraps=True)  # type: ignore[method-assign]
    try:
        first.close()
        recorder = memory(model)
        model.double()
        trace = trace_of(recorder)
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
        hooks.uninstall()
    [moved] = list(trace.transitions())
    assert moved.cause is not None and moved.cause.frame is not None
    assert moved.cause.frame.code == "model.double()"
    assert moved.cause.chain[-1] == "Module.double"


def test_a_part_of_torch_that_is_imported_inside_a_phase_is_observed_there() -> None:
    code = """
import json, sys, tempfile
import torch
import diagkit as dk
from diagkit.trace import read_rank
from diagkit.capture import start
assert "torch.distributed.checkpoint.state_dict_saver" not in sys.modules
model = torch.nn.Linear(2, 2)
recorder = start(model, out=None)
with recorder.phase("save"), tempfile.TemporaryDirectory() as folder:
    import torch.distributed.checkpoint as dcp
    dcp.save(model.state_dict(), checkpoint_id=folder)
recorder.close()
print(json.dumps(read_rank(recorder.lines).phases[1].calls))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"Module.state_dict": 1, "dcp.save": 1}


@pytest.mark.parametrize("where", ["concerns", "scan"])
def test_an_interrupt_that_strikes_inside_ours_goes_to_the_job_and_recording_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    recorder = memory(model)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(recorder._ledger.inventory), where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.double()
    model.double()
    model.float()
    trace = trace_of(recorder)
    assert [m.label for m in trace.moments][-3:] == ["Module.double", "Module.float", "end"]
    assert trace.problems == []


class Engine:
    def save(self) -> None: ...

    @staticmethod
    def load() -> None: ...

    class Inner:
        def move(self) -> None: ...


def test_a_method_is_named_with_its_class_where_its_code_does_not_know_it() -> None:
    from diagkit.capture.cause import searched_name

    found = [searched_name(f.__code__) for f in (Engine.save, Engine.load, small, nn.Linear.forward)]
    assert found == ["Engine.save", "Engine.load", "small", "Linear.forward"]


# ---- the job's own results


def test_results_and_arguments_pass_through_untouched() -> None:
    model = small()
    bare = small()
    recorder = memory(model)
    assert model.to(torch.float64) is model.double() is model.cpu() is model
    states = model.state_dict(prefix="x.", keep_vars=True)
    assert type(states) is type(bare.state_dict()) and hasattr(states, "_metadata")
    assert states["x.0.weight"] is model[0].weight
    told = model.load_state_dict({"0.weight": torch.ones(6, 4)}, strict=False)
    assert type(told).__name__ == "_IncompatibleKeys" and "2.weight" in told.missing_keys
    recorder.close()


def test_the_exception_of_a_call_is_the_very_object() -> None:
    class Stubborn(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            raise error

    error = KeyboardInterrupt("by hand")
    model = nn.Sequential(Stubborn(2, 2))
    recorder = memory(model)
    with pytest.raises(KeyboardInterrupt) as caught:
        model.double()
    assert caught.value is error
    trace = trace_of(recorder)
    [failed] = trace.failures
    assert failed.failure is not None
    assert (failed.failure.type, failed.failure.message) == ("KeyboardInterrupt", "by hand")


def test_an_exception_with_a_tensor_in_it_is_not_printed() -> None:
    recorder = memory(small())
    with pytest.raises(ValueError), recorder.phase("train"):
        raise ValueError("bad batch", [torch.ones(3)])
    [failed] = trace_of(recorder).failures
    assert failed.failure is not None and failed.failure.message == "(a message with tensors in it)"


def test_an_exception_that_cannot_be_printed_is_told_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    recorder = memory(small())
    with pytest.raises(Broken), recorder.phase("train"):
        raise Broken
    [failed] = trace_of(recorder).failures
    assert failed.failure is not None
    assert failed.failure.message == "(its message cannot be had: RuntimeError)"


def test_a_recorded_model_copies_pickles_and_saves_as_ever() -> None:
    model = small()
    recorder = memory(model)
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    recorder.close()
    for other in (copied, loaded):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        other.double()
    assert b"diagkit" not in pickle.dumps(model) and b"diagkit" not in file.getvalue()


def test_a_recorded_job_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        hidden = model[0].weight * 2
        model.register_buffer("derived", hidden)  # no leaf: reading its `.grad` would warn
        recorder = memory(model, optimizer)
        with recorder.phase("train"):
            step(model, optimizer)
        model.double()
        recorder.close()


# ---- modes of the caller's


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def job_in(mode: Any, recorded: bool) -> list[str]:
    with mode:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = memory(model, optimizer, detail="full") if recorded else None
        with recorder.phase("train") if recorder else contextlib.nullcontext():
            step(model, optimizer)
            model.add_module("extra", nn.Linear(2, 2))
        model.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        model.double()
        if recorder:
            recorder.mark("here")
            for _ in recorder.exported(model.state_dict().items()):
                pass
            recorder.close()
            assert not [line for line in recorder.lines if b'"trouble"' in line]
        else:
            model.state_dict()
    return mode.seen  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [Counting, CountingFunctions])
def test_a_mode_of_the_users_sees_none_of_our_reads(mode: Any) -> None:
    bare = job_in(mode(), recorded=False)
    assert len(bare) > 50
    assert job_in(mode(), recorded=True) == bare


def test_fake_tensors_are_recorded_as_far_as_they_can_be_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = small()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = small()
        recorder = memory({"real": real, "fake": fake})
        with recorder.phase("look"):
            fake.state_dict()
        trace = trace_of(recorder)
    assert trace.troubles == []
    state = trace.state(-1)
    by_model: dict[str, set[Any]] = {"real": set(), "fake": set()}
    for row in trace.rows:
        if row.kind == PARAMETER:
            by_model[row.model].add(trace.facts[state.facts[row.id]])
    assert {f.short() for f in by_model["real"]} == {"cpu/cpu"}
    assert {f.wrapper for f in by_model["fake"]} == {"FakeTensor"}
    # Its bytes are on meta, or nobody can tell where: never is a fake device taken for a real one.
    assert {f.storage_device for f in by_model["fake"]} <= {"meta", None}


def test_inference_and_no_grad_make_no_difference() -> None:
    model = small()
    recorder = memory(model, torch.optim.SGD(model.parameters()))
    with torch.inference_mode(), recorder.phase("eval"):
        model.double()
        model.state_dict()
    with torch.no_grad():
        model.float()
    trace = trace_of(recorder)
    assert trace.troubles == []
    assert len(list(trace.transitions())) == 4  # parameters and buffers, there and back


def lines(text: str) -> int:
    """The number of this file's one line that ends so."""
    [number] = [n for n, line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if line.endswith(text)]
    return number


def test_a_move_by_a_hook_and_what_the_call_around_it_did_are_told_apart() -> None:
    def double(module: nn.Module, keys: object) -> None:
        module.double()  # the hook's

    model, states = small(), small(1).state_dict()
    model.register_load_state_dict_post_hook(double)
    recorder = memory(model)
    with recorder.phase("load"):
        model.load_state_dict(states, assign=True)  # the job's
    trace = trace_of(recorder)
    assert trace.problems == trace.troubles == []
    told = [(m.label, m.cause.frame.line) for m in trace.moments if m.kind == CALL and m.cause and m.cause.frame]
    job, hook = lines("# the job's"), lines("# the hook's")
    assert told == [("Module.load_state_dict", job), ("Module.double", hook), ("Module.load_state_dict", job)]
    changed = {(t.moment.label, t.cause.frame.line) for t in trace.transitions() if t.cause and t.cause.frame}
    assert changed == {("Module.load_state_dict", job), ("Module.double", hook)}
    assert trace.phases[1].calls == {"Module.load_state_dict": 1, "Module._apply": 1}


def test_a_move_that_fails_in_a_hook_is_told_once() -> None:
    def fail(module: nn.Module, keys: object) -> None:
        with contextlib.suppress(KeyError):
            module._apply(refuse(KeyError))
        module._apply(refuse(ValueError))

    def refuse(kind: type[Exception]) -> Callable[[Any], Any]:
        def refused(tensor: Any) -> Any:
            raise kind("not this one")

        return refused

    model = small()
    model.register_load_state_dict_post_hook(fail)
    recorder = memory(model)
    with pytest.raises(ValueError, match="not this one"), recorder.phase("load"):
        model.load_state_dict(model.state_dict())
    trace = trace_of(recorder)
    told = [m.label for m in trace.moments if m.kind == FAILURE]
    assert told == ["Module._apply: KeyError", "Module._apply: ValueError"]


# ---- nothing kept alive


def test_nothing_watched_is_kept_alive_while_recording_or_after() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = memory(model, optimizer, engine=type("Engine", (), {})())
    with recorder.phase("train"):
        step(model, optimizer)
        with contextlib.suppress(RuntimeError):
            model.load_state_dict({"no": torch.ones(1)})
        model.double()
    gone = [weakref.ref(thing) for thing in (model, model[0], optimizer, model[0].weight, model[1].running_mean)]
    freed = StorageWeakRef(model[0].weight.untyped_storage())
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5
    assert freed.expired()
    recorder.mark("empty")
    trace = trace_of(recorder)
    assert trace.troubles == []
    assert set(trace.state(-1).facts) == {0}


def test_the_block_of_a_recording_keeps_nothing_alive(tmp_path: pathlib.Path) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = type("Engine", (), {})()
    gone = [weakref.ref(thing) for thing in (model, model[0].weight, optimizer, engine)]
    with dk.record(model, optimizer, out=tmp_path, engine=engine) as rec, rec.phase("train"):
        step(model, optimizer)
        del model, optimizer, engine
        gc.collect()
        assert [ref() for ref in gone] == [None] * 4


def test_exported_tensors_live_as_long_as_the_consumer_lets_them() -> None:
    class Tracked(torch.Tensor):
        pass

    def source() -> Iterator[tuple[str, Any]]:
        for number in range(4):
            yield str(number), torch.ones(3).as_subclass(Tracked)

    recorder = memory(small())
    alive: list[weakref.ref[Any]] = []
    for _, tensor in recorder.exported(source()):
        assert [ref() for ref in alive] == [None] * len(alive)
        alive.append(weakref.ref(tensor))
        del tensor
        assert alive[-1]() is None
    recorder.close()


def test_moving_by_swapping_tensors_works_while_recorded() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = memory(model, optimizer)
        step(model, optimizer)
        weight = model[0].weight
        model.double()
        assert model[0].weight is weight and weight.dtype == torch.float64
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert trace_of(recorder).troubles == []
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# ---- many times, many threads, many processes


@pytest.mark.slow
def test_ten_thousand_steps_grow_nothing(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.ones(1, 2)

    def sizes(recorder: Recorder) -> dict[str, int]:
        ledger = recorder._ledger
        found: dict[str, int] = {}
        for owner in (recorder, ledger, ledger.inventory, ledger.inventory.readings, ledger.writer, hooks):
            for name, value in vars(owner).items():
                if isinstance(value, (list, dict, set, tuple)):
                    found[f"{type(owner).__name__}.{name}"] = len(value)
        return found

    def ours() -> tracemalloc.Snapshot:
        gc.collect()
        return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, str(ROOT / "diagkit" / "*"))])

    with dk.record(model, optimizer, out=tmp_path) as recorder:
        for number in range(10_000):
            with recorder.phase("train"):
                step(model, optimizer, batch)
            if number % 50 == 0:
                model.double().float()
                optimizer.load_state_dict(optimizer.state_dict())
            if number == 1_000:
                early, patches = sizes(recorder), attributes()
            if number == 8_000:  # every allocation is noted from here on, which is slow
                tracemalloc.start()
            if number == 8_200:
                base = ours()
        grown = sum(stat.size_diff for stat in ours().compare_to(base, "filename"))
        tracemalloc.stop()
        assert sizes(recorder) == early
        assert grown < 5_000, f"{grown} bytes more than 1,800 steps ago"
        assert attributes() == patches
    trace = open_trace(tmp_path)[0]
    assert trace.problems == [] and trace.troubles == []
    assert len(trace.phases) == 10_001
    assert sum(phase.calls["Optimizer.step"] for phase in trace.phases.values() if phase.ordinal) == 10_000
    assert len(trace.facts) < 20 and len(trace.causes) < 20


def test_two_hundred_recordings_leave_no_more_than_one() -> None:
    model = small()
    before = attributes()
    for number in range(200):
        recorder = memory(model)
        if number % 3 == 0:
            model.double().float()
        recorder.close()
        assert all(now is then for now, then in zip(attributes(), before, strict=True))
    assert len(hooks._patches) < 40


def test_threads_with_recorders_of_their_own_do_not_meet() -> None:
    failures: list[BaseException] = []
    told: dict[int, list[str]] = {}

    def work(number: int) -> None:
        try:
            for _ in range(10):
                model = small(number)
                recorder = memory(model)
                with recorder.phase(f"thread {number}"):
                    for _ in range(3):
                        model.double()
                        model.float()
                trace = trace_of(recorder)
                told[number] = [m.label for m in trace.moments if m.kind == "call"]
                assert {phase.name for phase in trace.phases.values()} == {"", f"thread {number}"}
                assert trace.troubles == []
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert told == {number: ["Module.double", "Module.float"] * 3 for number in range(6)}


def test_threads_that_share_a_recorder_lose_no_event() -> None:
    models = {f"m{number}": small(number) for number in range(4)}
    recorder = memory(models)
    barrier = threading.Barrier(4)

    def work(model: nn.Module) -> None:
        barrier.wait()
        for _ in range(25):
            model.double()
            model.float()
            with recorder.phase("mine"):
                model.state_dict()

    threads = [threading.Thread(target=work, args=(model,)) for model in models.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = trace_of(recorder)
    assert trace.problems == [] and trace.troubles == []
    labels = [m.label for m in trace.moments]
    assert {name: labels.count(name) for name in ("Module.double", "Module.float", "Module.state_dict")} == {
        "Module.double": 100, "Module.float": 100, "Module.state_dict": 100,
    }  # fmt: skip
    assert labels.count("mine: enter") == labels.count("mine: exit") == 100
    final = trace.state(-1)
    assert {trace.facts[final.facts[row.id]].dtype for row in trace.rows if row.kind == PARAMETER} == {"float32"}  # type: ignore[union-attr]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_nothing_and_may_record_for_itself(tmp_path: pathlib.Path) -> None:
    model = small()
    with dk.record(model, out=tmp_path / "parent") as recorder, recorder.phase("train"):
        path = tmp_path / "parent" / "rank-00000.jsonl"
        before = path.read_bytes()
        with recorder._lock, hooks._lock:  # as another thread may hold them at that moment
            child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                model.double()
                with recorder.phase("child"):
                    recorder.mark("child")
                own = start(model, out=tmp_path / "child")
                model.float()
                own.close()
                recorder.close()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_bytes() == before
        model.double()
    assert [m.label for m in open_trace(tmp_path / "parent")[0].moments] == [
        "start", "train: enter", "Module.double", "train: exit", "end",
    ]  # fmt: skip
    assert [m.label for m in open_trace(tmp_path / "child")[0].moments] == ["start", "Module.float", "end"]


# ---- ties, parts, beginnings


def test_tied_parameters_are_told_as_such() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    recorder = memory(model)
    model.double()
    trace = trace_of(recorder)
    state = trace.state(-1)
    shares = {row.name: trace.facts[state.facts[row.id]].shares for row in trace.rows if row.kind == PARAMETER}  # type: ignore[union-attr]  # fmt: skip
    assert shares == {"embed.weight": None, "head.weight": "tie"}


MISTAKES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "an unknown detail",
        {"detail": "all"},
        UsageError,
        "unknown detail: found all, expected phases, transitions",
    ),
    ("no model", {"model": "model"}, UsageError, "this cannot be watched: found str"),
    ("a file", {"out": __file__}, TraceError, "cannot write a trace: found File exists"),
    ("a number for a folder", {"out": 5}, UsageError, "no folder for the trace: found int"),
    ("no folder", {"out": None}, UsageError, "no folder for the trace: found NoneType"),
]


@pytest.mark.parametrize(("name", "wrong", "kind", "message"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_a_mistake_of_the_callers_is_told_at_once(
    tmp_path: pathlib.Path, name: str, wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"model": small(), "out": tmp_path, **wrong}
    with pytest.raises(kind, match=message), dk.record(arguments.pop("model"), **arguments):
        pass


UNWRITABLE = """
import os, sys, warnings, json
import torch
import diagkit as dk
dk.record  # before rights are given up: the code may lie where nobody can read
if os.getuid() == 0:
    os.setuid(65534)
said = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, file, line, *rest: said.append((str(message), os.path.basename(file)))
model = torch.nn.Linear(2, 2)
with dk.record(model, out=sys.argv[1]) as rec:
    with rec.phase("train"):
        model.double()
print(json.dumps([said, str(model.weight.dtype)]))
"""


@pytest.mark.parametrize("place", ["folder", "below", "file"])
def test_a_folder_that_may_not_be_written_is_one_warning_and_the_job_goes_on(
    tmp_path: pathlib.Path, place: str
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    if place == "file":
        (folder / "rank-00000.jsonl").write_text("")
        (folder / "rank-00000.jsonl").chmod(0o444)
    folder.chmod(0o555)
    out = folder / "a" / "b" if place == "below" else folder
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        with contextlib.suppress(OSError):
            parent.chmod(0o755)
    command = [sys.executable, "-c", UNWRITABLE, str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    folder.chmod(0o755)
    assert result.returncode == 0, result.stderr
    said, dtype = json.loads(result.stdout)
    assert dtype == "torch.float64"
    [(message, _)] = said
    assert message.startswith("diagkit records nothing: cannot write a trace: found Permission denied")
    assert message.endswith("Name a folder that can be written. The job goes on.")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_job_on_a_full_disk_computes_the_same_with_one_warning(tmp_path: pathlib.Path) -> None:
    def job() -> list[Any]:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = [step(model, optimizer).item() for _ in range(3)]
        return [losses, *(tensor.tolist() for tensor in model.double().state_dict().values())]

    bare = job()
    (tmp_path / "rank-00000.jsonl").symlink_to("/dev/full")
    watched = small()
    with pytest.warns(RuntimeWarning) as warned, dk.record(watched, out=tmp_path) as rec:
        with rec.phase("train"):
            assert job() == bare
        watched.double()
    assert [str(w.message) for w in warned] == [
        "diagkit cannot write its trace (No space left on device); the job goes on, the trace has a gap"
    ]


@pytest.mark.parametrize("writable", [True, False])
def test_a_job_that_cannot_be_described_is_recorded_without_its_description(
    tmp_path: pathlib.Path, writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    model = small()
    if not writable:
        monkeypatch.setattr(begin, "TraceWriter", Unopened)
    with (
        contextlib.nullcontext() if writable else pytest.warns(RuntimeWarning, match="records nothing"),
        dk.record(model, out=tmp_path, job={"endless": endless}) as rec,
        rec.phase("move"),
    ):
        model.double()
    assert model[0].weight.dtype == torch.float64
    if writable:
        [trace] = open_trace(tmp_path)
        assert list(trace.header.job) == ["undescribed"]
        assert "RecursionError" in trace.header.job["undescribed"]
        assert trace.troubles == [] and trace.phases[1].name == "move"
    else:
        assert list(tmp_path.iterdir()) == []


def holding(**slots: Any) -> nn.Module:
    """A module with these put into its buffers past `register_buffer`, which would refuse some."""
    module = nn.Module()
    module._buffers.update(slots)
    return module


class Walled(nn.Module):
    """A module that lets nobody walk through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nobody comes in here")


def seventh() -> nn.Module:
    module = nn.Module()
    module._parameters[7] = nn.Parameter(torch.zeros(2))  # type: ignore[index]
    return module


def ragged(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


ODD: list[tuple[str, Callable[[], nn.Module], dict[str, tuple[tuple[int, ...] | None, str | None]]]] = [
    ("nested", lambda: holding(a=ragged(torch.strided)), {"odd.a": (None, "cpu")}),
    ("jagged", lambda: holding(a=ragged(torch.jagged)), {"odd.a": (None, "cpu")}),
    ("lazy", lambda: nn.LazyLinear(3), {"odd.weight": (None, "cpu"), "odd.bias": (None, "cpu")}),
    ("a number", lambda: holding(a=5), {}),  # what is no tensor lives nowhere
    ("a number for a name", seventh, {"odd.7": ((2,), "cpu")}),
    ("walled", Walled, {"odd.inner.weight": ((3, 2), "cpu"), "odd.inner.bias": ((3,), "cpu")}),
]


@pytest.mark.parametrize(("name", "make", "odd"), ODD, ids=[case[0] for case in ODD])
def test_an_odd_thing_in_a_model_hides_nothing_else(
    name: str, make: Callable[[], nn.Module], odd: dict[str, tuple[tuple[int, ...] | None, str | None]]
) -> None:
    model = nn.Sequential()
    model.odd = make()
    model.plain = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.plain.parameters(), momentum=0.9)
    recorder = memory(model, optimizer)
    with recorder.phase("train"):
        model.plain(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        recorder.mark("trained")
    with recorder.phase("move"):
        model.plain.double()
    trace = trace_of(recorder)
    assert trace.troubles == [] and trace.problems == []
    state = trace.state(-1)
    found = {row.name: row for row in trace.rows if row.kind in (PARAMETER, BUFFER)}
    facts = {key: trace.facts[state.facts[row.id]] for key, row in found.items()}
    assert {key: (row.shape, facts[key].storage_device) for key, row in found.items()} == {  # type: ignore[union-attr]
        **odd, "plain.weight": ((6, 4), "cpu"), "plain.bias": ((6,), "cpu")
    }  # fmt: skip
    for key, (_, device) in odd.items():
        assert (facts[key].unreadable is None) == (device is not None)  # type: ignore[union-attr]
    assert facts["plain.weight"].dtype == "float64"  # type: ignore[union-attr]
    parts = [(row.kind, row.name) for row in trace.rows if row.kind in (GRADIENT, OPTIMIZER_STATE)]
    assert (GRADIENT, "plain.weight") in parts and (OPTIMIZER_STATE, "plain.weight") in parts


class Unopened(TraceWriter):
    """A writer whose file cannot be opened, for a reason nobody thought of."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> TraceWriter:
        raise RecursionError("too deep")


def test_something_that_is_no_pair_passes_through_an_export() -> None:
    recorder = memory(small())
    things = ["one", ("two", torch.ones(1)), (1, 2, 3), None]
    assert list(recorder.exported(things)) == things  # type: ignore[arg-type]
    trace = trace_of(recorder)
    assert [row.name for row in trace.rows if row.kind == "export"] == ["two"]
