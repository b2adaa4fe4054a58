"""Records the traces in this folder anew: real processes, real FSDP2, on the simulated accelerator. ``make data``.

Each trace is redacted before it is kept, so that no host, user or path of the machine that recorded it is in it.
``python data/record.py [NAME ...]`` records only these. README.md says what each one shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import diagkit as dk
from diagkit.capture.recorder import Recorder
from diagkit.demo.predictions.bench import DECODER, Bench, build
from diagkit.demo.predictions.forked import fork_ranks, warm_up
from diagkit.trace.rewrite import rewrite

HERE = Path(__file__).resolve().parent
#: Name -> engine and revision of the demo's cell, process groups as RL workers have them, two ranks, one save.
ENGINES = {
    "fsdp-save-unguarded": ("fsdp", "before"),
    "fsdp-save-guarded": ("fsdp", "current"),
    "veomni-save-unguarded": ("veomni", "before"),
    "veomni-save-guarded": ("veomni", "current"),
}
VERL = "verl-0.8.0-save"
Scene = Callable[[Bench, Recorder, int], None]


def load_model_to_device(model: torch.nn.Module) -> None:
    """What an engine without a guard does before it saves."""
    model.to("npu")


def ranks_diverge(bench: Bench, recorder: Recorder, rank: int) -> None:
    """One rank alone moves the model, as in ``if rank == 1: model.to(device)``."""
    with recorder.phase("train"):
        bench.train()
    with recorder.phase("move"):
        if rank == 1:
            load_model_to_device(bench.model)


def rank_killed(bench: Bench, recorder: Recorder, rank: int) -> None:
    """Rank 1 is killed (as for memory) inside a save; its trace ends there, the other's goes on."""
    with recorder.phase("train"):
        bench.train()
    dist.barrier()
    with recorder.phase("save"):
        bench.model.state_dict()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def eight_ranks(bench: Bench, recorder: Recorder, rank: int) -> None:
    """Eight ranks train, save with the move that nothing guards, and fail; uneven shards, some without elements."""
    with recorder.phase("train"):
        bench.train()
    with recorder.phase("save"):
        load_model_to_device(bench.model)
        bench.model.state_dict()


def aborted_backward(bench: Bench, recorder: Recorder, rank: int) -> None:
    """An exception in a hook ends a backward pass; the next one "succeeds", and no parameter gets a gradient."""

    def mistake(*_: object) -> None:
        raise ValueError("a mistake in a user's own hook")

    handle = bench.model.get_submodule("layers.0").register_full_backward_hook(mistake)
    try:
        with recorder.phase("train"):
            bench.loss().backward()
    except ValueError:
        handle.remove()
    with recorder.phase("train"):
        bench.loss().backward()
        bench.optimizer.step()


def healed(bench: Bench, recorder: Recorder, rank: int) -> None:
    """The move splits every parameter, `dk.heal` mends them, and training and saving go on."""
    with recorder.phase("train"):
        bench.train()
        bench.optimizer.zero_grad()
    with recorder.phase("move"):
        load_model_to_device(bench.model)
    with recorder.phase("heal"):
        dk.heal(bench.model, bench.optimizer)
    with recorder.phase("train"):
        bench.train()
    with recorder.phase("save"):
        bench.model.state_dict()


SCENES: dict[str, tuple[Scene, int]] = {
    "ranks-diverge": (ranks_diverge, 2),
    "rank-killed": (rank_killed, 2),
    "eight-ranks": (eight_ranks, 8),
    "aborted-backward": (aborted_backward, 2),
    "healed": (healed, 2),
}


def play(name: str, out: Path) -> None:
    """Plays a scene on forked ranks and leaves its traces in the folder."""
    scene, ranks = SCENES[name]

    def work(rank: int, tell: object) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), DIAGKIT_RUN=name)
        bench = build(DECODER, "pinned")
        with dk.record(bench.model, bench.optimizer, out=out, job={"scene": name}) as recorder:
            scene(bench, recorder, rank)

    fork_ranks(work, ranks, timeout=120)


def engine(name: str, out: Path) -> None:
    """Runs a cell of the demo; its traces are in the one folder of a cell that it leaves."""
    kind, revision = ENGINES[name]
    command = [sys.executable, "-m", "diagkit", "demo", "--device", "sim", "--ranks", "2", "--out", str(out)]
    command += ["--engine", kind, "--revision", revision, "--operation", "save", "--group", "cpu:gloo,npu:hccl"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def verl(name: str, out: Path) -> None:
    """verl 0.8.0's own FSDP engine saves, in the environment of ``make test-verl``; verl loads diagkit as a plug-in."""
    sys.path.insert(0, str(HERE.parent / "tests" / "verl"))
    from realengines import environment
    from realengines.cells import Cell
    from realengines.launch import launch

    environment.build()
    cell = Cell("0.8.0", "fsdp", "policy", "save", 2)
    variables = {"DIAGKIT_TRACE": str(out / "trace"), "VERL_USE_EXTERNAL_MODULES": "diagkit.auto"}
    out.mkdir()
    folder = environment.release_folder(cell.release)
    launch(environment.PYTHON, folder, [cell], out, environment=variables, cold=True)


def keep(name: str, recorded: Path) -> None:
    """Redacts what was recorded and puts it in the place of what was there."""
    trace, place = dk.open_trace(recorded).redacted(), HERE / name
    for rank in trace:
        # The run is known by its folder here; its revision is a commit on the way to the one that holds this trace.
        rank.header = replace(rank.header, run=name, revision="")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    rewrite(trace, place)
    print(f"{name}: {sum(file.stat().st_size for file in place.iterdir()):,} bytes")


def main(*names: str) -> None:
    wanted = names or (*ENGINES, *SCENES, VERL)
    warm_up()  # scenes are forked from this process, which must not have touched a device
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / name
            if name == VERL:
                verl(name, out)
                keep(name, out / "trace")
            elif name in ENGINES:
                engine(name, out)
                (cell,) = (path.parent for path in out.glob("cells/*_save_policy_*/rank-00000.jsonl"))
                keep(name, cell)
            else:
                play(name, out)
                keep(name, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
