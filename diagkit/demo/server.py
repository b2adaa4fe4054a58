"""The warm process that every rank of every cell is forked from.

Rules of this module: it loads torch and starts the simulated accelerator once, touches no real device, and starts no
thread, so that a fork is a clean and quick start (half a second instead of four). Jobs come in on standard input, one
JSON object a line; one answer a line goes out. When the parent goes away, so does it, and every rank with it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

from diagkit.errors import DiagkitError, EngineError

__all__ = ["main", "warm_up"]

GRACE = 10.0
"""Seconds that the other ranks have once one of them failed."""


def warm_up(wanted: str, ranks: int) -> dict[str, Any]:
    """Load everything that a cell needs, choose the device, and say what there is.

    Raises:
        EngineError: the device that was asked for is not there, or not often enough.
        SimulatorError: the simulated accelerator cannot be started.
    """
    # Asking CUDA's driver how many devices there are would spoil it for every forked rank; NVML does not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch
    import torch._dynamo  # FSDP2 imports it at its first use, in every rank of every cell: most of a second each

    import diagkit.demo.life  # noqa: F401  # loads the engines, FSDP2, DTensor and the checkpoint functions

    torch.set_num_threads(1)
    device = _choose(wanted, ranks)
    if device == "sim":
        from diagkit.lab import simulate

        simulate()
    kind = "npu" if device == "sim" else device
    return {"device": kind, "simulated": device == "sim", "pid": os.getpid(), "torch": torch.__version__}


def _choose(wanted: str, ranks: int) -> str:
    real = [wanted] if wanted in ("npu", "cuda") else ["npu", "cuda"] if wanted == "auto" else []
    for kind in real:
        count = _devices(kind)
        if count >= ranks:
            return kind
        if wanted == kind:
            raise EngineError(
                f"not enough {kind} devices",
                found=count,
                expected=f"{ranks}, one a rank",
                remedy="Choose fewer --ranks, or --device sim",
            )
    return "sim" if wanted == "auto" else wanted


def _devices(kind: str) -> int:
    import torch

    if kind == "npu":
        # Importing torch_npu is what registers the device; it is never installed by us.
        if importlib.util.find_spec("torch_npu") is None:
            return 0
        importlib.import_module("torch_npu")
    return int(torch.get_device_module(kind).device_count())


def main() -> int:
    """Serve jobs until standard input ends."""
    _die_with_parent()
    # Answers get a descriptor of their own: whatever a library prints must not end up between them.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        ready = warm_up(sys.argv[1], int(sys.argv[2]))
    except DiagkitError as error:
        _answer(answers, {"error": str(error)})
        return 2
    _answer(answers, ready)
    for line in sys.stdin:
        _answer(answers, _run_job(json.loads(line), ready["device"]))
    return 0


def _answer(answers: IO[str], content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _run_job(job: dict[str, Any], device: str) -> dict[str, Any]:
    """Fork the ranks of one job, gather their records until the time is up, end whoever is left."""
    _folder(job).mkdir(parents=True, exist_ok=True)
    for old in _folder(job).glob("rank-*"):
        old.unlink()  # of an earlier run, which may have had more ranks
    with tempfile.TemporaryDirectory(prefix="diagkit-") as folder:
        pipes: dict[int, int] = {}
        pids: list[int] = []
        for rank in range(job["ranks"]):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                for other in pipes:
                    os.close(other)
                _rank(job, rank, device, folder, write)
            os.close(write)
            pipes[read] = rank
            pids.append(pid)
        texts = _gather(pipes, job["timeout"])
        exits = [_end(pid) for pid in pids]
    records = [json.loads(text) if text else None for text in texts]
    return {"pids": pids, "exits": exits, "records": records}


def _folder(job: dict[str, Any]) -> Path:
    return Path(job["out"]) / "cells" / str(job["slug"])


def _rank(job: dict[str, Any], rank: int, device: str, folder: str, write: int) -> None:
    """The child's whole life: it never returns."""
    try:
        _die_with_parent()
        log = _folder(job) / f"rank-{rank}.log"
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(target, 1)
        os.dup2(target, 2)
        from diagkit.demo.cell import start_rank

        try:
            start_rank(rank, job["ranks"], job["group"], device, f"{folder}/rendezvous")
            record = _TASKS[job["task"]](job, device, Path(folder).name)
        except BaseException as error:
            traceback.print_exc()
            record = {"outcome": "broken", "exception": {"type": type(error).__name__, "message": str(error)}}
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(record))
    finally:
        # No destructors: tearing a process group down after a failure can wait for a rank that is gone.
        sys.stderr.flush()
        os._exit(0)


def _cell(job: dict[str, Any], device: str, run: str) -> dict[str, Any]:
    from diagkit.demo.cell import run_cell
    from diagkit.demo.experiments import Experiment

    return run_cell(Experiment(**job["cell"]), Path(job["out"]), device, run=run)


def _preparation(job: dict[str, Any], device: str, run: str) -> dict[str, Any]:
    from diagkit.demo.cell import run_preparation
    from diagkit.demo.experiments import Experiment

    return run_preparation(Experiment(**job["cell"]), Path(job["out"]), device)


def _life(job: dict[str, Any], device: str, run: str) -> dict[str, Any]:
    from diagkit.demo.life import run_life
    from diagkit.demo.scenario import Scenario

    return run_life(Scenario(**job["scenario"]), _folder(job), Path(job["checkpoint"]), device, run)


_TASKS = {"cell": _cell, "preparation": _preparation, "life": _life}
"""What a rank can be asked to do; each gets the job, the device and the run's id, and returns a record."""


def _gather(pipes: dict[int, int], seconds: float) -> list[str]:
    """Read every pipe to its end while there is time; one text a rank, empty for a rank that did not finish."""
    texts = dict.fromkeys(pipes.values(), b"")
    finished: set[int] = set()
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for pipe, rank in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if chunk:
                    texts[key.data] += chunk
                    continue
                finished.add(key.data)
                selector.unregister(key.fd)
                if b'"outcome": "ok"' not in texts[key.data]:
                    # This rank failed or died: the others fail alike, or wait for it in a collective for ever.
                    deadline = min(deadline, time.monotonic() + GRACE)
    for pipe in pipes:
        os.close(pipe)
    return [texts[rank].decode() if rank in finished else "" for rank in sorted(texts)]


def _end(pid: int) -> int:
    """Wait briefly for a child that has delivered its record, kill one that has not; its exit status."""
    for _ in range(50):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere a parent's death leaves it to the timeout."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    try:
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    except (AttributeError, OSError):
        return


if __name__ == "__main__":
    sys.exit(main())
