"""Runs cells: a state is provoked and an operation done, in processes that live for nothing else.

Ranks are forked from a process that has torch and the simulated accelerator loaded, which makes a cell a matter of
half a second. Operations that leave the state as it was, by every fact, follow one another in the same processes;
the next one after a change gets new ones.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from diagkit.demo.predictions.bench import Bench, Kind, build
from diagkit.demo.predictions.operations import attempt
from diagkit.demo.predictions.states import State
from diagkit.diagnosis.predictions.facets import Facets
from diagkit.diagnosis.predictions.lookup import OPERATIONS, Cell
from diagkit.errors import SimulatorError
from diagkit.trace import RankTrace

GROUPS = {"mixed": "cpu:gloo,{device}:{backend}", "alone": "{device}:{backend}"}


def warm_up() -> str:
    """Loads what every cell needs and starts the simulated accelerator; its device type."""
    import torch._dynamo  # FSDP2 imports it in every rank otherwise
    import torch.distributed.checkpoint.state_dict

    import diagkit.capture  # noqa: F401
    from diagkit.lab import simulate

    torch.set_num_threads(1)
    return simulate().name


def run_state(
    kind: Kind, state: State, ranks: int, device: str = "npu", alone: bool = False, timeout: float = 60
) -> tuple[Facets, dict[str, Cell]]:
    """Every operation in this state: the state's facets (rank 0's), and what each operation did on all ranks.

    ``alone``: each operation in processes of its own. Ranks that disagree make a cell of their own kind.

    Raises:
        SimulatorError: the ranks did not bring the state about.
    """
    left = list(OPERATIONS)
    found: dict[str, Cell] = {}
    key: Facets | None = None
    while left:
        answers = _fork(kind, state, ranks, device, left[:1] if alone else left, timeout)
        facets = [Facets(**a["facets"]) for a in answers if a and a.get("facets")]
        if len(facets) < ranks:
            told = next((a["error"] for a in answers if a and a.get("error")), "no answer")
            raise SimulatorError(f"the state {state.name!r} did not come about", found=told)
        key = facets[0]
        done = min(len(a["cells"]) for a in answers if a)
        if done == 0:  # a rank hung or died in the operation
            found[left.pop(0)] = Cell("crash", "no answer")
        for i in range(done):
            cells = {Cell(*a["cells"][i]) for a in answers if a}
            found[left.pop(0)] = cells.pop() if len(cells) == 1 else Cell("crash", "ranks disagree: " + str(cells))
    assert key is not None
    return key, found


def _fork(
    kind: Kind, state: State, ranks: int, device: str, operations: list[str], timeout: float
) -> list[dict[str, Any] | None]:
    with tempfile.TemporaryDirectory(prefix="diagkit-") as folder:
        pipes: dict[int, int] = {}
        pids = []
        for rank in range(ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                _rank(kind, state, rank, ranks, device, operations, f"{folder}/store", write)
            os.close(write)
            pipes[read] = rank
            pids.append(pid)
        texts = _gather(pipes, timeout)
        for pid in pids:
            if not os.waitpid(pid, os.WNOHANG)[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [_last(text) for text in texts]


def _last(text: bytes) -> dict[str, Any] | None:
    lines = [line for line in text.split(b"\n") if line.endswith(b"}")]
    return json.loads(lines[-1]) if lines else None


def _rank(
    kind: Kind, state: State, rank: int, ranks: int, device: str, operations: list[str], store: str, write: int
) -> None:
    """A child's whole life; it never returns. After each operation it writes all it has: the next one may hang."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if not os.environ.get("DIAGKIT_CELLS_LOUD"):
            os.dup2(quiet, 2)
        answer: dict[str, Any] = {"cells": []}
        try:
            bench = _provoke(kind, state, rank, ranks, device, store)
            answer["facets"] = asdict(bench.facets())
            _tell(write, answer)
            for cell in _attempts(bench, operations):
                answer["cells"].append([cell.outcome, cell.error])
                _tell(write, answer)
        except BaseException as error:
            traceback.print_exc()
            answer["error"] = f"{type(error).__name__}: {error}"
            _tell(write, answer)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _tell(write: int, answer: dict[str, Any]) -> None:
    os.write(write, json.dumps(answer).encode() + b"\n")


def _provoke(kind: Kind, state: State, rank: int, ranks: int, device: str, store: str) -> Bench:
    torch.get_device_module(device).set_device(rank)
    group = GROUPS[state.group].format(device=device, backend="hccl")
    dist.init_process_group(group, init_method=f"file://{store}", rank=rank, world_size=ranks)
    bench = build(kind, state.policy, device, state.on_meta)
    for step in state.recipe:
        step(bench)
    return bench


def _attempts(bench: Bench, operations: list[str]) -> Iterator[Cell]:
    before = _everything(bench)
    for operation in operations:
        yield attempt(bench, operation)
        if _everything(bench) != before:
            return


def _everything(bench: Bench) -> list[object]:
    from diagkit.capture import snapshot

    rank: RankTrace = snapshot(bench.model, bench.optimizer)
    pointers = [p.to_local().data_ptr() if hasattr(p, "to_local") else p.data_ptr() for p in bench.model.parameters()]
    return [*(rank.facts[n] for n in rank.state(-1).facts), pointers]


def _gather(pipes: dict[int, int], seconds: float) -> list[bytes]:
    texts = dict.fromkeys(pipes.values(), b"")
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for pipe, rank in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                texts[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    for pipe in pipes:
        os.close(pipe)
    return [texts[rank] for rank in sorted(texts)]
