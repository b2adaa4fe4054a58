"""Starts real processes, one a rank, and brings back what each of them said.

``run_ranks`` takes a script (a path) or a function of a test module; each rank gets the environment that ``torchrun``
would set, with a rendezvous on loopback, so that ``init_process_group(backend)`` needs no arguments.
"""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class RankResult:
    """One rank's end: exit code (negative: the signal), what it printed, and whether it had to be killed for time."""

    rank: int
    rc: int
    stdout: str
    stderr: str
    timed_out: bool = False


class RanksFailed(AssertionError):
    """At least one rank did not end with exit code 0."""


def run_ranks(
    script: str | Path | Callable[..., None],
    world_size: int,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120.0,
    check: bool = True,
    python: str = sys.executable,
    cwd: str | Path | None = None,
) -> list[RankResult]:
    """Runs ``script`` in ``world_size`` processes and waits for all; results are ordered by rank.

    A function must live at the top level of an importable test module; it is called with ``args`` (strings). ``env`` is
    laid over this process's environment; a value of None removes a variable. After ``timeout`` seconds, whatever still
    runs is killed. With ``check`` a failed rank raises :class:`RanksFailed` with the end of every failed rank's output.
    """
    if callable(script):
        source = Path(inspect.getfile(script)).resolve()
        code = (
            f"import sys; sys.path.insert(0, {str(source.parent)!r}); "
            f"import {source.stem} as m; m.{script.__name__}(*sys.argv[1:])"
        )
        command = [python, "-c", code, *args]
    else:
        command = [python, str(script), *args]
    port = free_port()
    started = []
    for rank in range(world_size):
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        for key, value in (env or {}).items():
            if value is None:
                variables.pop(key, None)
            else:
                variables[key] = value
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                env=variables,
                cwd=cwd,
            )
        )
    results = _collect(started, time.monotonic() + timeout)
    failed = [result for result in results if result.rc != 0]
    if check and failed:
        raise RanksFailed(
            "\n".join(f"rank {r.rank}: exit {r.rc}\n{r.stdout[-1500:]}\n{r.stderr[-4000:]}" for r in failed)
        )
    return results


def own_words(stdout: str) -> str:
    """What a process printed, less what torch 2.9 says there when gloo has connected."""
    return "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith("[Gloo] Rank"))


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _collect(started: list[subprocess.Popen[str]], deadline: float) -> list[RankResult]:
    # Threads, because a rank that fills its pipe while another is being read would wait forever.
    from concurrent.futures import ThreadPoolExecutor

    def finish(rank: int) -> RankResult:
        process = started[rank]
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            return RankResult(rank, process.returncode, own_words(out), err)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            return RankResult(rank, process.returncode, own_words(out), err + "\n(killed: out of time)", timed_out=True)

    with ThreadPoolExecutor(len(started)) as pool:
        return list(pool.map(finish, range(len(started))))
