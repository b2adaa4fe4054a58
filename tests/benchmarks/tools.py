"""The tools that look at tensors, each as its users put it around a training step.

What is started once for a whole run is put in by ``on`` and taken out by ``off``, outside the timing; ``around`` is
what stands around each step. ``events`` says how many things the tool told of one step, counted afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from facts import managed_parameters, read_facts
from torch import nn
from torch.optim import Optimizer

from diagkit.capture import hooks, start
from diagkit.trace import open_trace


def _idle() -> None:
    pass


def _none() -> None:
    return None


@dataclass
class Tool:
    """One tool, ready for one model."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    on: Callable[[], None] = _idle
    off: Callable[[], None] = _idle
    events: Callable[[], float | None] = _none  # told of one step; None: it does not say


Make = Callable[[nn.Module, Optimizer, str], Tool]


def nothing(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    return Tool()


def diagkit(detail: str) -> Make:
    """The step is a recorded phase; what was told of the last one is read back from the trace."""

    def make(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
        recorder = start(model, optimizer, out=out, detail=detail)

        @contextlib.contextmanager
        def recorded() -> Iterator[None]:
            with recorder.phase("train"):
                yield

        def told() -> float:
            recorder.close()
            rank = next(iter(open_trace(out)))
            last = max(rank.phases)
            moments = sum(moment.phase == last for moment in rank.moments)
            return moments + sum(rank.phases[last].calls.values())

        if detail == "phases":
            return Tool(recorded, events=told)
        return Tool(recorded, lambda: hooks.add(recorder), lambda: hooks.remove(recorder), told)

    return make


def bare_loop(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    """The facts that diagkit reads of each parameter, read in the plainest way before and after the step."""
    parameters = managed_parameters(model)

    @contextlib.contextmanager
    def looked_at() -> Iterator[None]:
        read_facts(parameters)
        yield
        read_facts(parameters)

    return Tool(looked_at, events=lambda: 2 * len(parameters))


def mem_tracker(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)

    def once_more() -> Any:
        tracker.reset_mod_stats()  # it refuses a second step otherwise
        return tracker

    return Tool(once_more)


def fsdp_mem_tracker(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    return Tool(lambda: tracker)


def comm_debug_mode(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    from torch.distributed.tensor.debug import CommDebugMode

    mode = CommDebugMode()
    return Tool(lambda: mode, events=mode.get_total_counts)


def debug_mode(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
    from torch.utils._debug_mode import DebugMode

    last: list[Any] = []

    def fresh() -> Any:
        last[:] = [DebugMode(record_tensor_attributes=["device"])]
        return last[0]

    return Tool(fresh, events=lambda: len(last[0].operators))


def profiler(**options: bool) -> Make:
    def make(model: nn.Module, optimizer: Optimizer, out: str) -> Tool:
        last: list[Any] = []

        def on() -> None:
            last[:] = [torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)]
            last[0].__enter__()
            running.append(True)

        def off() -> None:
            if running:
                running.clear()
                last[0].__exit__(None, None, None)

        def fresh() -> None:
            off()
            on()

        running: list[bool] = []
        return Tool(on=fresh, off=off, events=lambda: len(last[0].events()))

    return make


TOOLS: dict[str, Make] = {
    "nothing": nothing,
    "diagkit phases": diagkit("phases"),
    "diagkit transitions": diagkit("transitions"),
    "diagkit full": diagkit("full"),
    "bare loop": bare_loop,
    "MemTracker": mem_tracker,
    "FSDPMemTracker": fsdp_mem_tracker,
    "CommDebugMode": comm_debug_mode,
    "DebugMode": debug_mode,
    "profiler": profiler(),
    "profiler, stacks and memory": profiler(with_stack=True, profile_memory=True),
}
