"""A job whose machine runs out of something in the middle of a recording: device memory, disk, descriptors, memory.

On the simulated accelerator, one rank. Each case computes the same with and without a recording.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harmless_training import digest
from recorder_world import begin, end, sharded, train_step
from ways import belongings, left_behind, observed

import diagkit as dk
from diagkit.lab import running
from diagkit.trace import open_trace


class Trainer:
    """A sharded model and its optimizer, after a first step."""

    def __init__(self) -> None:
        self.model = sharded(seed=2, layers=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0
        self.train()

    def train(self) -> str:
        """The loss of one more step, exactly."""
        self.step += 1
        return train_step(self.model, self.optimizer, self.step).item().hex()

    def move(self) -> None:
        """A call that is told also where it changes nothing."""
        self.model.float()


@contextlib.contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """Inside, the process has no more than this of a resource."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def device_memory(trainer: Trainer, begins: Callable[[], Any]) -> list[str]:
    """A step that finds no device memory, and another that does."""
    simulation = running()
    assert simulation is not None
    with begins() as recorder:
        simulation.set_capacity(torch.npu.memory_allocated() + 600)
        try:
            with phase(recorder, "train"):
                trainer.train()
            met = "nothing"
        except torch.OutOfMemoryError as error:
            met = type(error).__name__
        finally:
            simulation.set_capacity(0)
        trainer.optimizer.zero_grad()
        return [met, trainer.train()]


def disk(trainer: Trainer, begins: Callable[[], Any]) -> list[str]:
    """No file may grow beyond what the trace has by now and half a line; later it may again."""
    found = []
    with begins() as recorder:
        size = 1 << 14 if recorder is None else recorder.path.stat().st_size + 100
        with limited(resource.RLIMIT_FSIZE, size):
            for _ in range(3):
                with phase(recorder, "full"):
                    trainer.move()
                    found.append(trainer.train())
        with phase(recorder, "room again"):
            found.append(trainer.train())
    return found


def descriptors(trainer: Trainer, begins: Callable[[], Any]) -> list[str]:
    """Not one file more may be opened while the recording goes on."""
    with begins() as recorder:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        taken = []
        with limited(resource.RLIMIT_NOFILE, highest + 1):
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            with phase(recorder, "train"):
                trainer.move()
                found = [trainer.train()]
            with contextlib.suppress(RuntimeError), phase(recorder, "fail"):
                trainer.model.load_state_dict({"nonsense": torch.ones(1)})
            for one in taken:
                os.close(one)
    return [*found, trainer.train()]


def no_descriptor_to_begin(trainer: Trainer, begins: Callable[[], Any]) -> list[str]:
    """Not even the trace's file can be opened."""
    with limited(resource.RLIMIT_NOFILE, 3), begins():
        trainer.move()
        return [trainer.train()]


def memory(trainer: Trainer, begins: Callable[[], Any]) -> list[str]:
    """A look at a model of many tensors that finds no memory for them: MemoryError at any place of ours."""
    crowd = torch.nn.Module()
    for number in range(20_000):
        crowd.register_buffer(f"b{number}", torch.empty(0), persistent=False)
    met = "nothing"
    with begins() as recorder:
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        with limited(resource.RLIMIT_AS, used + (2 << 20)):
            if recorder is not None:
                recorder.watch({"crowd": crowd})
                recorder.mark("crowded")
            try:
                bytearray(64 << 20)
            except MemoryError as error:
                met = type(error).__name__
        with phase(recorder, "train"):
            trainer.move()
            return [met, trainer.train()]


CASES = {case.__name__: case for case in (device_memory, disk, descriptors, no_descriptor_to_begin, memory)}


def phase(recorder: Any, name: str) -> contextlib.AbstractContextManager[None]:
    """A phase, where somebody records."""
    return contextlib.nullcontext() if recorder is None else recorder.phase(name)  # type: ignore[no-any-return]


def told(folder: pathlib.Path) -> dict[str, Any] | None:
    """What the trace says; None where there is none."""
    if not any(folder.glob("*.jsonl")):
        return None
    [trace] = open_trace(folder)
    return {
        "problems": trace.problems,
        "troubles": trace.troubles,
        "ended": trace.ended,
        "phases": [phase.name for phase in trace.phases.values() if phase.ordinal],
        "failures": [moment.failure.type for moment in trace.failures if moment.failure],
    }


def main(folder_name: str) -> None:
    begin()
    before = observed()
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        for way in ("bare", "phases", "transitions", "full"):
            folder = pathlib.Path(folder_name) / name / way
            trainer = Trainer()

            def begins(trainer: Trainer = trainer, folder: pathlib.Path = folder, way: str = way) -> Any:
                if way == "bare":
                    return contextlib.nullcontext()
                return dk.record(trainer.model, trainer.optimizer, out=folder, detail=way)

            had = belongings()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                results = case(trainer, begins)
            found.setdefault(name, {})[way] = {
                "results": [*results, digest([trainer.model.state_dict(), trainer.optimizer.state_dict()])],
                "left": left_behind(before),
                "belongings": [had, belongings()],
                "warned": [str(one.message) for one in warned if "diagkit" in str(one.message)],
                "trace": told(folder),
            }
    end()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
