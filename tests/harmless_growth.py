"""Two thousand recorded steps, and two hundred recordings: prints what there was early and what there was late.

FSDP2 on the CPU, one rank. Cost is counted in calls of our own functions, which no load of the machine changes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from ways import belongings, left_behind, observed

import diagkit as dk

STEPS, RECORDINGS = 2000, 200
WINDOW = 64  # steps: a whole number of those after which the trace holds a whole state again
FIRST, EARLY, LATE = 100, 300, STEPS - WINDOW  # in the first window some things happen for the first time
OURS = str(pathlib.Path(dk.__file__).parent) + os.sep


def trainee() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded layer and its optimizer."""
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def counted(calls: list[int]) -> Iterator[None]:
    """Appends how many of our functions were called inside."""
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        calls.append(count)


def objects() -> int:
    """How many objects the garbage collector knows."""
    gc.collect()
    return len(gc.get_objects())


def long_run(folder: pathlib.Path, detail: str) -> dict[str, Any]:
    """Calls, objects, lines and bytes of an early and a late window of steps."""
    model, optimizer = trainee()
    calls: list[int] = []
    known: list[int] = []
    written: list[tuple[int, int]] = []
    with dk.record(model, optimizer, out=folder, detail=detail) as recorder:

        def step() -> None:
            with recorder.phase("train"):
                train(model, optimizer)

        def size() -> None:
            assert recorder.path is not None
            told = recorder.path.read_bytes()
            written.append((told.count(b"\n"), len(told)))

        done = 0
        for start in (FIRST, EARLY, LATE):
            while done < start:
                step()
                done += 1
            known.append(objects())
            size()
            with counted(calls):
                for _ in range(WINDOW):
                    step()
            done += WINDOW
            size()
    grown = [(after[0] - before[0], after[1] - before[1]) for before, after in zip(*[iter(written)] * 2, strict=True)]
    return {"steps": done, "calls": calls[1:], "objects": known[1:], "written": grown[1:]}


def recordings(folder: pathlib.Path, detail: str) -> dict[str, Any]:
    """Objects and belongings after some recordings and after all; models whose job let them go while recorded."""
    known, alive = [], 0
    had = []
    for number in range(RECORDINGS):
        model, optimizer = trainee()
        refs = [weakref.ref(thing) for thing in (model, model[0], optimizer)]  # type: ignore[index]
        with dk.record(model, optimizer, out=folder / "trace", detail=detail, overwrite=True) as recorder:
            with recorder.phase("train"):
                train(model, optimizer)
            with contextlib.suppress(RuntimeError):
                model.load_state_dict({"nonsense": torch.ones(1)})
            del model, optimizer
            if number % 20 == 0:
                gc.collect()
                alive += sum(ref() is not None for ref in refs)
        if number in (RECORDINGS // 4, RECORDINGS - 1):
            known.append(objects())
            had.append(belongings())
    return {"objects": known, "belongings": had, "alive": alive}


def main(folder_name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = observed()
    found: dict[str, Any] = {}
    for detail in ("phases", "transitions", "full"):
        folder = pathlib.Path(folder_name) / detail
        found[detail] = {"run": long_run(folder / "long", detail), "recordings": recordings(folder, detail)}
        found[detail]["left"] = left_behind(before)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
