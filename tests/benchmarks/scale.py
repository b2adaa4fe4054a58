"""What reading and diagnosing costs at the size of a large job: up to 1,024 ranks of 10,000 parameters and 40 moments.

The traces are made with the public writer and are hard on the reader on purpose: every rank has local shapes of its
own, and on every rank another hundredth of the parameters lives elsewhere than the rest, so that no two ranks are
equal. ``diagkit diagnose`` runs as its users run it, in a process of its own, whose time and largest memory are taken.
No torch is needed. Run:

    python tests/benchmarks/scale.py                     1,024 x 10,000 x 40: diagnosis and report
    python tests/benchmarks/scale.py --curve build/scale cost against ranks and against parameters: JSON and PNG
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from diagkit.trace.schema import (
    BUFFER,
    CALL,
    ENTER,
    EXIT,
    FAILURE,
    GROUP,
    PARAMETER,
    Cause,
    Change,
    Failure,
    Frame,
    GroupFacts,
    Header,
    Residency,
    Row,
)
from diagkit.trace.writer import TraceWriter

RANKS, PARAMETERS, MOMENTS = 1024, 10_000, 40
#: Of each rank's parameters so many live elsewhere than the others, and no rank's are another's.
ODD = 0.01
LAYER = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
MESSAGE = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:{}".'


def names(count: int) -> list[str]:
    """So many parameter names, as models have them."""
    return [f"model.layers.{i // len(LAYER)}.{LAYER[i % len(LAYER)]}.weight" for i in range(count)]


def write(folder: pathlib.Path, rank: int, ranks: int, parameters: int, moments: int, sick: bool) -> None:
    """One rank: init with its momentary split, training, and a save whose move splits where the rank is sick."""
    draw = random.Random(rank)
    device = f"npu:{rank % 8}"
    header = Header(
        run="scale", rank=rank, world_size=ranks, local_rank=rank % 8, host=f"node{rank // 8}", torch="2.13.0",
        device="npu", device_index=rank % 8, simulated=True, backends="cpu:gloo,npu:hccl",
    )  # fmt: skip
    writer = TraceWriter.create(folder, header)
    shapes = [(4096 // ranks + draw.randrange(2), 1024 * (i % len(LAYER) + 1)) for i in range(parameters)]
    writer.table([Row(i, PARAMETER, "model", n, shape=(4096, 1024)) for i, n in enumerate(names(parameters))], shapes)
    writer.table([Row(parameters, BUFFER, "model", "model.rotary_emb.inv_freq", shape=(64,))])
    groups = ["", *(f"model.layers.{i}" for i in range(-(-parameters // len(LAYER))))]
    writer.table([Row(parameters + 1 + i, GROUP, "model", name) for i, name in enumerate(groups)])
    odd = sorted(draw.sample(range(parameters), int(parameters * ODD)))

    def on(metadata: str, storage: str, pinned: bool) -> Residency:
        return Residency(
            metadata, storage, "bfloat16", "bfloat16", pinned, "DTensor", "npu", requires_grad=True,
            flat_device=storage, flat_pinned=pinned, aliased=True, registered=True, sharded_state="sharded",
        )  # fmt: skip

    def all_on(usual: Residency, other: Residency) -> list[Change]:
        changes, start = [], 0
        for row in [*odd, parameters]:
            if row > start:
                changes.append(Change(start, row - start, writer.fact_id(usual), True))
            if row < parameters:
                changes.append(Change(row, 1, writer.fact_id(other), True))
            start = row + 1
        return changes

    buffer = [Change(parameters, 1, writer.fact_id(Residency(device, device, "float32", "float32", False)))]
    group = GroupFacts(True, True, "CPUOffloadPolicy", device=device, mesh_device="npu", mesh_size=ranks, parameters=7)
    sharded = [Change(parameters + 1, len(groups), writer.fact_id(group))]
    rest = all_on(on("cpu", "cpu", True), on("cpu", "cpu", False))
    split = all_on(on(device, "cpu", True), on(device, "cpu", False))
    meta = all_on(on("meta", "meta", False), on("meta", "meta", False))

    def by(line: int, function: str) -> Cause:
        frame = Frame("/srv/job/engine.py", line, function, "module.to(device)")
        return Cause("Module._apply", (f"Engine.{function}", "Module.to"), frame, (frame,), "model", f"device={device}")

    write = writer.moment
    write(ENTER, "init: enter", 1, [], key=True, begins={"name": "init"})
    write(CALL, "fully_shard", 1, [*meta, *buffer, *sharded])
    write(CALL, "Module._apply", 1, split, cause=by(12, "initialize"))
    write(CALL, "Module._apply", 1, rest, cause=by(14, "initialize"))
    write(EXIT, "init: exit", 1, [])
    steps = (moments - 5 - 4) // 3
    for step in range(2, 2 + steps):
        write(ENTER, "train: enter", step, [], begins={"name": "train"})
        write(CALL, "Optimizer.step", step, [])
        write(EXIT, "train: exit", step, [])
    last = 2 + steps
    write(ENTER, "save: enter", last, [], begins={"name": "save"})
    if sick:
        write(CALL, "Module._apply", last, split, cause=by(41, "save_checkpoint"))
        failure = Failure("RuntimeError", MESSAGE.format(rank % 8), "Module.state_dict")
        write(FAILURE, "Module.state_dict", last, [], failure=failure)
    write(EXIT, "save: exit", last, [])
    writer.close()


def make(folder: pathlib.Path, ranks: int, parameters: int, moments: int, sick: float) -> int:
    """Writes a run and returns its size in bytes. Of its ranks, the share ``sick`` splits."""
    for rank in range(ranks):
        write(folder, rank, ranks, parameters, moments, rank < ranks * sick)
    return sum(file.stat().st_size for file in folder.iterdir())


def measure(folder: pathlib.Path, command: str = "diagnose") -> dict[str, float]:
    """Seconds and largest memory (MB) of a command on a folder, from the start of its process to its end."""
    arguments = [sys.executable, "-m", "diagkit", *command.split(), str(folder)]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out, subprocess.Popen(arguments, stdout=out) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        out.seek(0)
        codes = [line.split()[0] for line in out.read().decode().splitlines() if line.startswith("DK")]
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": took, "cpu_seconds": cpu, "megabytes": usage.ru_maxrss / 1024, "findings": len(codes)}


def curve() -> Iterator[dict[str, float]]:
    """Cost against ranks and against parameters, healthy and sick."""
    cases = [(ranks, 2000) for ranks in (1, 32, 64, 128, 256)] + [(32, n) for n in (100, 1000, 5000, 10_000, 20_000)]
    for ranks, parameters in cases:
        for sick in (0.0, 1.0):
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                size = make(folder, ranks, parameters, MOMENTS, sick)
                yield {"ranks": ranks, "parameters": parameters, "sick": sick, "bytes": size, **measure(folder)}


def draw(points: list[dict[str, float]], path: pathlib.Path) -> None:
    """Two panels: CPU seconds against ranks, and against parameters; the title of each says what one more costs."""
    from matplotlib.figure import Figure

    from diagkit.views import palette

    lines = ((0.0, "healthy", palette.GOOD, "o"), (1.0, "every rank split", palette.BAD, "s"))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, axis, other, value in ((panels[0], "ranks", "parameters", 2000), (panels[1], "parameters", "ranks", 32)):
        slopes = []
        for sick, name, colour, mark in lines:
            chosen = sorted((p[axis], p["cpu_seconds"]) for p in points if p["sick"] == sick and p[other] == value)
            panel.plot(*zip(*chosen, strict=True), marker=mark, color=colour, label=name)
            slopes.append((chosen[-1][1] - chosen[0][1]) / (chosen[-1][0] - chosen[0][0]))
        step, unit = (1, "a further rank") if axis == "ranks" else (1000, "per 1,000 parameters")
        cost = " to ".join(f"{slope * step * 1000:.1f}" for slope in slopes)
        panel.set(xlabel=axis, title=f"{value:,} {other}: {cost} ms {unit}", ylim=(0, None))
        panel.locator_params(axis="x", nbins=5)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("CPU seconds of diagkit diagnose")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--moments", type=int, default=MOMENTS)
    parser.add_argument("--sick", type=float, default=1.0, help="share of ranks that split (default: all)")
    parser.add_argument("--keep", metavar="DIR", type=pathlib.Path, help="leave the traces there, or use those")
    parser.add_argument(
        "--curve", metavar="DIR", type=pathlib.Path, help="measure several sizes; JSON and PNG go there"
    )
    args = parser.parse_args()
    if args.curve:
        args.curve.mkdir(parents=True, exist_ok=True)
        points = []
        for point in curve():
            print(json.dumps(point), flush=True)
            points.append(point)
        (args.curve / "scale.json").write_text(json.dumps(points, indent=1))
        draw(points, args.curve / "scale.png")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or pathlib.Path(name)
        if not (folder / "rank-00000.jsonl").exists():
            make(folder, args.ranks, args.parameters, args.moments, args.sick)
        size = sum(file.stat().st_size for file in folder.iterdir())
        with tempfile.TemporaryDirectory() as out:
            page = pathlib.Path(out, "report.html")
            found = {"diagnose": measure(folder), "report": measure(folder, f"report -o {page}")}
            found["report"]["bytes"] = page.stat().st_size
        print(json.dumps({"ranks": args.ranks, "parameters": args.parameters, "bytes": size, **found}))


if __name__ == "__main__":
    main()
