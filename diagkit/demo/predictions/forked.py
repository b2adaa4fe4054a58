"""Ranks forked from a warm process: half a second each instead of four.

The parent has torch and the simulated accelerator loaded, has touched no device and started no thread, so a fork is
a clean start. What a rank does is a function; what it answers is plain data, and may come piece by piece, because
the next piece may hang.
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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Answer = dict[str, Any]
#: ``work(rank, tell)``: what one rank does; ``tell(answer)`` hands over all that is known so far.
Work = Callable[[int, Callable[[Answer], None]], None]

#: The process groups of real nodes: what RL workers use, and what the SFT trainer uses.
GROUPS = {"mixed": "cpu:gloo,{device}:hccl", "alone": "hccl"}


def warm_up() -> str:
    """Loads what ranks need and starts the simulated accelerator; its device type."""
    import torch._dynamo  # FSDP2 imports it in every rank otherwise
    import torch.distributed.checkpoint.state_dict

    import diagkit.capture  # noqa: F401
    from diagkit.lab import simulate

    torch.set_num_threads(1)
    return simulate().name


def fork_ranks(
    work: Work, ranks: int, device: str = "npu", group: str = "mixed", timeout: float = 60, loud: bool = False
) -> list[Answer | None]:
    """Each rank's last answer, None for a rank that gave none. A rank that raises answers with ``error`` added.

    The ranks find themselves in an initialised process group of the kind ``group`` of `GROUPS`, each on its own device.
    ``loud`` lets them print.
    """
    with tempfile.TemporaryDirectory(prefix="diagkit-") as folder:
        pipes: dict[int, int] = {}
        pids = []
        for rank in range(ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _live(work, rank, ranks, device, group, f"{folder}/store", write, loud)
            os.close(write)
            pipes[read] = rank
            pids.append(pid)
        texts = _gather(pipes, timeout)
        for pid in pids:
            _end(pid)
    return [_last(text) for text in texts]


def _live(work: Work, rank: int, ranks: int, device: str, group: str, store: str, write: int, loud: bool) -> None:
    """A rank's whole life; it never returns."""
    told: Answer = {}

    def tell(answer: Answer) -> None:
        told.update(answer)
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(write, data) :]

    try:
        if not loud:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        try:
            torch.get_device_module(device).set_device(rank)
            where = f"file://{store}"
            dist.init_process_group(GROUPS[group].format(device=device), init_method=where, rank=rank, world_size=ranks)
            work(rank, tell)
        except BaseException as error:
            traceback.print_exc()
            tell({**told, "error": f"{type(error).__name__}: {error}"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No destructors: tearing a process group down after a failure can wait for a rank that is gone.
        os._exit(0)


def _last(text: bytes) -> Answer | None:
    lines = [line for line in text.split(b"\n") if line.endswith(b"}")]
    return json.loads(lines[-1]) if lines else None


def _end(pid: int) -> None:
    for _ in range(50):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


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
