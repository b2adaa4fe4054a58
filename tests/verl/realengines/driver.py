"""Run a list of cells in verl's environment: ``python -m realengines.driver --cells FILE --out DIR``.

One process imports verl (some seconds) and forks each cell's ranks from there, so that every operation has processes
of its own without every process paying for the import. ``--cold`` starts each rank afresh instead and lets it end as
any script does, for tests that set environment variables and read what a job prints. Each rank writes
``OUT/CELL/rank-N.json``, rewritten at every stage: a rank that dies has left its last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from realengines.cells import Cell

STANDIN = Path(__file__).resolve().parent.parent / "standin"


def prepare(with_veomni: bool) -> None:
    """Start the simulated accelerator, put the stand-in torch_npu in place, import the engines. The order matters."""
    warnings.simplefilter("ignore")
    import torch

    from diagkit.lab import simulate

    torch.set_num_threads(1)
    simulate()
    sys.path.insert(0, str(STANDIN))
    import torch_npu  # noqa: F401
    import verl.workers.engine.fsdp.transformer_impl

    if with_veomni:
        import verl.workers.engine.veomni.transformer_impl  # noqa: F401


class Report:
    """What one rank saw, on disk after every change."""

    def __init__(self, cell: Cell, rank: int, path: Path) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "cell": cell.as_dict(),
            "rank": rank,
            "pid": os.getpid(),
            "stage": "start",
            "outcome": "died",
            "residency": {},
        }
        self.write()

    def write(self, **facts: Any) -> None:
        """Add facts and replace the file in one move, so that no reader sees half of it."""
        self.facts.update(facts)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.facts, indent=1))
        fresh.replace(self._path)


def run_rank(cell: Cell, rank: int, out: Path, model: Path) -> None:
    """Do one cell's operation on one rank and report it; what stopped the operation is reported and raised."""
    import torch
    import torch.distributed as dist

    from realengines import observe, operations

    folder = out / cell.name
    report = Report(cell, rank, folder / f"rank-{rank}.json")
    engine = None
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(cell.ranks))
        torch.npu.set_device(rank)
        dist.init_process_group(
            cell.groups,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=cell.ranks,
            timeout=timedelta(seconds=40),
        )
        side = operations.side_of(cell)
        engine = side.make_engine(cell, model)
        report.write(stage="init")
        engine.initialize()
        before = observe.storages(engine.module)
        report.facts["residency"]["init"] = observe.residency(engine.module)
        observe.watch(engine.module, report.facts["residency"])
        report.write(stage=cell.operation)
        with guarded(engine):
            extra = operations.OPERATIONS[cell.operation](side, engine, cell, rank, out, model)
        after = observe.storages(engine.module)
        report.facts["residency"]["end"] = observe.residency(engine.module)
        report.write(outcome="ok", storages_exchanged=observe.exchanged(before, after), **extra)
    except BaseException as error:
        if engine is not None and getattr(engine, "module", None) is not None:
            report.facts["residency"]["failure"] = observe.residency(engine.module)
        report.write(outcome="error", exception=observe.failure(error, "verl"))
        raise


def guarded(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """diagkit's guard over the engine, as ``REAL_ENGINES_GUARD`` says ("raise", "skip", "warn"); none without it."""
    mode = os.environ.get("REAL_ENGINES_GUARD")
    if not mode:
        return contextlib.nullcontext()
    import diagkit
    from diagkit.remedy import MoveWarning

    warnings.simplefilter("always", MoveWarning)
    return diagkit.guard(engine, on_move=mode)


def fork_rank(cell: Cell, rank: int, out: Path, model: Path) -> int:
    """Fork one rank, its output in a log beside its report, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        log = os.open(out / cell.name / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_rank(cell, rank, out, model)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A failed engine must not run destructors that wait for its other ranks.
        os._exit(status)


def start_rank(cell: Cell, rank: int, out: Path) -> int:
    """Start one rank as a job's launcher does, and return its process id."""
    command = [sys.executable, "-m", "realengines.driver", "--out", str(out), "--rank", str(rank)]
    with (out / cell.name / f"rank-{rank}.log").open("w") as log:
        return subprocess.Popen([*command, "--cell", json.dumps(cell.as_dict())], stdout=log, stderr=log).pid


def wait(pids: list[int], seconds: float) -> bool:
    """Wait for the ranks; kill what is left after ``seconds`` and return False then."""
    deadline = time.monotonic() + seconds
    left = set(pids)
    while left and time.monotonic() < deadline:
        done, _ = os.waitpid(-1, os.WNOHANG)
        if done:
            left.discard(done)
        else:
            time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def write_model(model: Path) -> None:
    """Write the model that the engines load, in a process of its own, so that no thread is there to be forked."""
    pid = os.fork()
    if not pid:
        from realengines import verl_side

        verl_side.write_model(model)
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> int:
    """Run every cell in order; exit 0 when all were run, whatever their outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, help="JSON list of cells")
    parser.add_argument("--out", type=Path, required=True, help="folder for reports, logs and the model")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--cold", action="store_true", help="start each rank afresh")
    parser.add_argument("--rank", type=int, help="be this rank of --cell, and nothing else")
    parser.add_argument("--cell", type=json.loads, help="JSON of one cell")
    options = parser.parse_args()
    out = options.out.resolve()
    model = out / "model"
    if options.cell:
        cell = Cell(**options.cell)
        prepare(cell.engine == "veomni")
        run_rank(cell, options.rank, out, model)
        return 0
    cells = [Cell(**fields) for fields in json.loads(options.cells.read_text())]
    if options.cold:
        from diagkit.lab.simdevice import build

        build.built()  # before any rank's time runs
    else:
        prepare(any(cell.engine == "veomni" for cell in cells))
        # What is there now stays, and is not copied page by page by each rank's garbage collector.
        gc.freeze()
    if not model.exists():
        write_model(model)
    for cell in cells:
        folder = out / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rendezvous").unlink(missing_ok=True)
        begun = time.monotonic()
        ranks = range(cell.ranks)
        if options.cold:
            pids = [start_rank(cell, rank, out) for rank in ranks]
        else:
            pids = [fork_rank(cell, rank, out, model) for rank in ranks]
        finished = wait(pids, options.timeout)
        print(f"{cell.name}\t{time.monotonic() - begun:.1f} s{'' if finished else ' TIMEOUT'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
