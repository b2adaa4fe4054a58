"""Everything that is measured, in one go: ``make bench``.

Each tool and set-up runs in a process of its own (`step_cost`). The result is one JSON file with the machine, the
date and every figure, and a table in Markdown made from it; the README quotes the table. The parts can be run alone:

    python tests/benchmarks/bench.py [--only steps reading ...] [--quick]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TABLE = HERE / "results.md"

# Not tools.TOOLS: this process imports no torch, which would only take memory from those that are measured.
TOOLS = (
    "nothing",
    "bare loop",
    "diagkit phases",
    "diagkit transitions",
    "diagkit full",
    "profiler",
    "profiler, stacks and memory",
    "CommDebugMode",
    "DebugMode",
    "MemTracker",
    "FSDPMemTracker",
)
#: Blocks and pairs of steps by width: about as many layers as models have, and as many pairs as an hour allows.
WIDTHS = {64: (24, 100), 512: (16, 50)}
SETUPS = [
    {"width": width, "blocks": WIDTHS[width][0], "ranks": ranks, "offload": offload, "pairs": WIDTHS[width][1] // ranks}
    for ranks in (1, 2)
    for offload in (True, False)
    for width in WIDTHS
]
# A model of few and tiny layers shows what a phase costs however small the model is.
SETUPS.append({"width": 64, "blocks": 8, "ranks": 1, "offload": True, "pairs": 100})


def call(*words: object, timeout: float = 900) -> tuple[float, str]:
    """Runs a Python of its own; seconds and what it printed last."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, cwd=HERE.parent.parent, timeout=timeout
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return seconds, (done.stdout.splitlines() or [""])[-1]


def steps(quick: bool) -> list[dict[str, Any]]:
    """Each tool around a training step, in each set-up."""
    results = []
    for setup in SETUPS:
        for tool in TOOLS:
            ours = tool in ("nothing", "bare loop") or tool.startswith("diagkit")
            # The peers cost so much more that fewer pairs tell.
            pairs = 5 if quick else setup["pairs"] if ours else setup["pairs"] // 4
            words = ["--tool", tool, "--width", setup["width"], "--blocks", setup["blocks"], "--ranks", setup["ranks"]]
            words += ["--pairs", pairs, *([] if setup["offload"] else ["--no-offload"])]
            try:
                results.append(json.loads(call(HERE / "step_cost.py", *words)[1]))
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                results.append({"tool": tool, **setup, "failed": str(error).splitlines()[-1][:300]})
            tell(results[-1])
    return results


def tell(result: dict[str, Any]) -> None:
    figure = f"{result['over_null']:.3f}" if "over_null" in result else "failed: " + result["failed"]
    print(f"{named(result):42} {result['tool']:28} {figure}", flush=True)


def named(result: dict[str, Any]) -> str:
    """A set-up in words."""
    ranks = f"{result['ranks']} rank{'s' * (result['ranks'] > 1)}"
    return f"{result['blocks']} blocks of width {result['width']}, {ranks}{'' if result['offload'] else ', no offload'}"


def reading(quick: bool) -> dict[str, Any]:
    """A look at every parameter, against the bare loop and ``state_dict()``."""
    return json.loads(call(HERE / "snapshot_cost.py")[1])  # type: ignore[no-any-return]


def imports(quick: bool) -> dict[str, float]:
    """Median milliseconds of each import, beyond an interpreter that imports nothing."""
    probes = {
        "diagkit": "import diagkit",
        "diagkit.auto after torch": "import diagkit.auto",
        "diagkit.trace": "import diagkit.trace",
    }
    found = {}
    for name, statement in probes.items():
        before = "import torch" if "torch" in name else "pass"
        script = f"import time\n{before}\na = time.perf_counter()\n{statement}\nprint((time.perf_counter() - a) * 1e3)"
        found[name] = statistics.median(float(call("-c", script)[1]) for _ in range(7))
    return found


def simulated(quick: bool) -> dict[str, Any]:
    """Seconds of a step on the simulated accelerator and on the plain CPU."""
    found = {}
    for width in (512, 64):
        shape = f"'{width}', '32', '{8 if width == 512 else 60}'"
        script = f"import sys; sys.path.insert(0, 'tests'); import speed_ranks; speed_ranks.main({shape})"
        found[f"width {width}"] = json.loads(call("-c", script)[1])
    return found


def demo(quick: bool) -> dict[str, float]:
    """Seconds of the demo with an empty cache of compiled parts (cold) and with a full one (warm)."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DIAGKIT_CACHE"] = cache
        try:
            return {name: call("-m", "diagkit", "demo")[0] for name in ("cold", "warm")}
        finally:
            del os.environ["DIAGKIT_CACHE"]


def notebooks(quick: bool) -> dict[str, Any]:
    """Seconds of each notebook, by hand and with the tests' parameters."""
    only = ("--quick", "--only", "01") if quick else ()
    return json.loads(call(HERE / "notebooks.py", *only)[1])  # type: ignore[no-any-return]


def recording(quick: bool) -> dict[str, Any]:
    """What recording costs as models grow and as a job goes on; the figure is beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        words = (folder, "--quick") if quick else (HERE,)
        return json.loads(call(HERE / "recording.py", *words, timeout=1800)[1])  # type: ignore[no-any-return]


def scale(quick: bool) -> dict[str, Any]:
    """Diagnosis and report of a large job, and the cost of diagnosis against ranks and parameters (a figure)."""
    size = ["--ranks", 16, "--parameters", 200] if quick else []
    largest = json.loads(call(HERE / "scale.py", *size, timeout=1800)[1])
    if not quick:
        call(HERE / "scale.py", "--curve", HERE, timeout=1800)
    return largest  # type: ignore[no-any-return]


def visibility(quick: bool) -> dict[str, Any]:
    """What each tool says of five models."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        call(HERE / "visibility.py", "--json", file.name, timeout=1800)
        return json.loads(Path(file.name).read_text())["tools"]  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[bool], Any]] = {
    "steps": steps,
    "reading": reading,
    "imports": imports,
    "simulated": simulated,
    "demo": demo,
    "notebooks": notebooks,
    "recording": recording,
    "scale": scale,
    "visibility": visibility,
}


def machine() -> dict[str, Any]:
    """What was measured on; no name of any host."""
    _, torch = call("-c", "import torch; print(torch.__version__)")
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch,
        "load": round(os.getloadavg()[0], 1),
    }


def table(results: dict[str, Any]) -> str:
    """The results for people."""
    on = results["machine"]
    lines = [
        f"Measured on {on['date']}: {on['cpu']}, {on['cores']} cores, Python {on['python']}, torch {on['torch']}, "
        f"load {on['load']} before{'; ' + on['note'] if on.get('note') else ''}. `make bench` measures anew.",
        "",
    ]
    if "steps" in results:
        columns = list(dict.fromkeys(map(named, results["steps"])))
        lines += [
            "Step time with the tool over without, less what a null run beside it shows:",
            "",
            "| tool | " + " | ".join(columns) + " | µs per event |",
            "|---|" + "---|" * (len(columns) + 1),
        ]
        for tool in dict.fromkeys(s["tool"] for s in results["steps"]):
            mine = {named(s): s for s in results["steps"] if s["tool"] == tool}
            cells = [f"{mine[c]['over_null']:.3f}" if "over_null" in mine.get(c, {}) else "fails" for c in columns]
            each = [s["us_per_event"] for s in mine.values() if s.get("us_per_event")]
            lines.append(f"| {tool} | {' | '.join(cells)} | {f'{statistics.median(each):.1f}' if each else '-'} |")
        lines.append("")
    if "reading" in results:
        r = results["reading"]
        lines += [
            f"A look at a parameter takes {r['us_per_parameter']['snapshot']:.1f} µs: "
            f"{r['snapshot_over']['bare loop']:.2f} of a bare loop over the same facts, "
            f"{r['snapshot_over']['state_dict()']:.2f} of `state_dict()`.",
            "",
        ]
    if "imports" in results:
        lines += ["Imports: " + ", ".join(f"`{k}` {v:.1f} ms" for k, v in results["imports"].items()) + ".", ""]
    if "simulated" in results:
        each = ", ".join(f"{v['npu'] / v['cpu']:.2f} at {k}" for k, v in results["simulated"].items())
        lines += [f"A step on the simulated accelerator over one on the CPU: {each}.", ""]
    if "demo" in results:
        d = results["demo"]
        lines += [f"`diagkit demo`: {d['cold']:.0f} s when it must compile first, {d['warm']:.0f} s afterwards.", ""]
    if "notebooks" in results:
        lines += [
            "Seconds of each notebook:",
            "",
            "| notebook | by hand | with the parameters of its test | the same, of processor time |",
            "|---|---|---|---|",
        ]
        for name, taken in results["notebooks"].items():
            tests = taken["tests"]
            by_hand = f"{taken['by hand']['wall']:.0f}" if "by hand" in taken else "-"
            lines.append(f"| {name} | {by_hand} | {tests['wall']:.0f} | {tests['processor']:.0f} |")
        lines.append("")
    if "recording" in results:
        r = results["recording"]
        small, large = r["by_parameters"][0], r["by_parameters"][-1]
        ends = (statistics.median(point["added_ms"] for point in part) for part in halves(r["by_steps"]))
        lines += [
            f"The two edges of a phase take {small['edges_ms']:.2f} ms at {small['parameters']:,} parameters and "
            f"{large['edges_ms']:.1f} ms at {large['parameters']:,}; a mark {small['mark_ms']:.2f} and "
            f"{large['mark_ms']:.1f} ms. A recorded step takes {' and '.join(f'{ms:.2f}' for ms in ends)} ms longer in "
            f"the first and the second half of {r['by_steps'][-1]['steps']:,} steps, and "
            f"{statistics.median(point['bytes'] for point in r['by_steps']):,.0f} bytes of the trace.",
            "",
            "![cost of recording against parameters and against steps](recording.png)",
            "",
        ]
    if "scale" in results:
        r = results["scale"]
        lines += [
            f"{r['ranks']:,} ranks of {r['parameters']:,} parameters, {r['bytes'] / 1e6:,.0f} MB of traces: "
            f"`diagkit diagnose` {r['diagnose']['seconds']:.1f} s and {r['diagnose']['megabytes']:.0f} MB of memory; "
            f"`diagkit report` {r['report']['seconds']:.1f} s, {r['report']['megabytes']:.0f} MB, a page of "
            f"{r['report']['bytes'] / 1e3:,.0f} kB.",
            "",
            "![cost of diagnosis against ranks and against parameters](scale.png)",
            "",
        ]
    if "visibility" in results:
        models = list(next(iter(results["visibility"].values())))
        lines += [
            "What each tool says of where the parameters are (half: one of the two devices; nothing: no device):",
            "",
            "| tool | " + " | ".join(models) + " |",
            "|---|" + "---|" * len(models),
        ]
        for tool, cells in results["visibility"].items():
            lines.append(f"| {tool} | " + " | ".join(cell["verdict"] for cell in cells.values()) + " |")
        lines.append("")
    return "\n".join(lines)


def halves(points: list[Any]) -> tuple[list[Any], list[Any]]:
    return points[: len(points) // 2], points[len(points) // 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--note", default="", help="what else there is to know of the machine, such as what ran beside")
    parser.add_argument("--quick", action="store_true", help="five pairs, to see that everything runs; writes nothing")
    args = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and not args.quick else {}
    results: dict[str, Any] = {**known, "machine": {**machine(), "note": args.note}}
    for name in args.only:
        results[name] = PARTS[name](args.quick)
        if not args.quick:  # after each part: an hour is long
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            TABLE.write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
