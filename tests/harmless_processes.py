"""A recorded job that has children: worker processes, forks in the middle of a call, spawned processes.

Each child would write into its parent's trace, report, or hang, if it took itself for its parent. Prints what became of
each, and of the trace.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harmless_training import digest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from ways import Phase, left_behind, observed, watched

from diagkit.capture import Recorder, hooks
from diagkit.trace import open_trace

PATIENCE = 60.0  # seconds after which a child counts as hanging


class Trainer:
    """A sharded model on the CPU and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train_batch(self, batch: torch.Tensor) -> str:
        """The loss, exactly."""
        loss = self.model(batch).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item().hex()


class Rows(Dataset[torch.Tensor]):
    """Rows that its worker makes while it uses the parent's model and one of its own, as tokenisers and filters do."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        own = nn.Linear(3, 3).double().float()
        own.load_state_dict(own.state_dict())
        if self.model is not None:
            self.model.double()
            torch.optim.SGD(self.model.parameters(), lr=0.1).state_dict()
        return torch.rand(3, generator=torch.Generator().manual_seed(index))


def loaded(trainer: Trainer, how: str) -> list[str]:
    """Losses over batches that worker processes made."""
    rows = Rows(trainer.model if how == "fork" else None)
    batches = DataLoader(rows, batch_size=2, num_workers=2 if how == "fork" else 1, multiprocessing_context=how)
    return [trainer.train_batch(batch) for batch in batches]


def child_that_trains(trainer: Trainer) -> None:
    trainer.model.double().float()
    trainer.optimizer.step()
    sys.exit(3)


def child_that_fails(trainer: Trainer) -> None:
    trainer.model.double()
    raise ValueError("the child's own")


def started(target: Callable[[Trainer], None], trainer: Trainer) -> int | None:
    """Exit code of a forked process of this target."""
    process = multiprocessing.get_context("fork").Process(target=target, args=(trainer,))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
    return process.exitcode


def forked_inside_a_call(trainer: Trainer) -> int:
    """Exit code of a child that is forked in a hook of `state_dict`, while another thread holds all locks of ours. It
    leaves the call, the phase and the recording, and then Python, in order."""
    children: list[int] = []

    def fork(*_: Any) -> None:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            locks = [hooks._lock, *(one._lock for one in hooks._listeners if isinstance(one, Recorder))]
            for lock in locks:
                lock.acquire()
            held.set()
            done.wait()
            for lock in locks:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        children.append(os.fork())
        done.set()
        if children[0]:
            thread.join()

    handle = trainer.model.register_state_dict_pre_hook(fork)
    trainer.model.state_dict()
    handle.remove()
    if children[0] == 0:
        atexit.unregister(dist.destroy_process_group)
        raise SystemExit(5)
    return waited(children[0])


def waited(child: int) -> int:
    """Exit code of a child, or what a killed one has."""
    timer = threading.Timer(PATIENCE, os.kill, (child, 9))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status)


def work(trainer: Trainer, phase: Phase) -> dict[str, Any]:
    """All children, one after the other, and what the parent computed meanwhile."""
    with phase("fork"):
        losses = loaded(trainer, "fork")
        codes = [started(child_that_trains, trainer), started(child_that_fails, trainer)]
        codes.append(forked_inside_a_call(trainer))
    return {"codes": codes, "results": [*losses, digest(trainer.model.state_dict())]}


def spawned(trainer: Trainer, phase: Phase) -> dict[str, Any]:
    """What the parent computed with rows of a spawned worker."""
    with phase("spawn"):
        return {"results": loaded(trainer, "spawn")}


def traced(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What each trace under the folder says."""
    found = []
    for file in sorted(folder.rglob("*.jsonl")):
        [trace] = open_trace(file.parent)
        pids = {json.loads(line).get("pid", trace.header.pid) for line in file.read_bytes().splitlines()}
        found.append(
            {
                "pids": len(pids),
                "own": trace.header.pid == os.getpid(),
                "problems": trace.problems,
                "troubles": trace.troubles,
                "ended": trace.ended,
                "dtypes": sorted({fact.dtype for fact in trace.facts if getattr(fact, "dtype", None)}),
            }
        )
    return found


def main(folder_name: str) -> None:
    dist.init_process_group("gloo")
    before = observed()
    found: dict[str, Any] = {}
    for way in ("bare", "phases", "transitions", "full", "attach", "auto"):
        folder = pathlib.Path(folder_name) / way
        found[way] = watched(way, folder, Trainer, work)
        found[way] |= {"left": left_behind(before), "traces": traced(folder)}
        if -9 in found["bare"]["codes"]:  # children hang on this torch by themselves: nothing can be told of ours
            print(json.dumps(found))
            return
    for way in ("bare", "full"):
        folder = pathlib.Path(folder_name) / f"spawn-{way}"
        found[f"spawn {way}"] = watched(way, folder, Trainer, spawned)
        found[f"spawn {way}"] |= {"left": left_behind(before), "traces": traced(folder)}
    print(json.dumps(found))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
