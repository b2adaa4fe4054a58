"""How long the explorer takes to answer: 10,000 parameters, 200 moments, 2 ranks, two runs beside each other.

Two stories: the whole model moves and moves back; and a random tenth of the parameters lives by itself. Each answer is
the model's and its HTML, as the widgets send it; the browser's own time is not in it. Choices come for the first time
("first") and again ("again"), in processor time, because a busy machine says nothing of the explorer. No torch is
needed. Run: ``python tests/benchmarks/explorer_response.py``
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

from diagkit.trace.merged import Trace
from diagkit.trace.rank import RankTrace
from diagkit.trace.reader import read_rank
from diagkit.trace.schema import CALL, ENTER, EXIT, PARAMETER, Cause, Change, Frame, Header, Residency, Row
from diagkit.trace.writer import MemorySink, TraceWriter
from diagkit.views import explore
from diagkit.views.explorer import Explorer
from diagkit.views.explorer.panes import cause_pane, state_pane

PARAMETERS, MOMENTS, PHASE = 10_000, 200, 20
LIMIT = 0.3  # seconds
FRAME = Frame("/srv/job/engine.py", 41, "save_checkpoint", "load_model_to_device(self.module)")
MOVE = Cause("Module._apply", ("Engine.save_checkpoint", "Module.to"), FRAME, (FRAME,), "model")


def names() -> list[str]:
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    return [f"model.layers.{i // 7}.{parts[i % 7]}.weight" for i in range(PARAMETERS)]


def story(rank: int, scattered: bool, seed: int) -> RankTrace:
    """One rank: a phase every `PHASE` moments; in its middle something moves to the device, at its end back."""
    draw = random.Random(seed)
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="response", rank=rank, world_size=2, device="npu", simulated=True))
    rows = [Row(i, PARAMETER, "model", name, shape=(64, 64)) for i, name in enumerate(names())]
    writer.table(rows, [(32, 64)] * PARAMETERS)
    facts = {"dtype": "float32", "storage_dtype": "float32", "pinned": True, "aliased": True}
    home = writer.fact_id(Residency("cpu", "cpu", **facts))  # type: ignore[arg-type]
    away = writer.fact_id(Residency(f"npu:{rank}", "cpu", **facts))  # type: ignore[arg-type]
    whole = [Change(0, PARAMETERS, home)]
    moved: list[int] = []
    for moment in range(MOMENTS):
        phase, step = moment // PHASE + 1, moment % PHASE
        changes: list[Change] = []
        if step == PHASE // 2:
            moved = sorted(draw.sample(range(PARAMETERS), PARAMETERS // 10)) if scattered else []
            changes = [Change(row, 1, away, True) for row in moved] or [Change(0, PARAMETERS, away, True)]
        elif step == PHASE - 2:
            changes = [Change(row, 1, home, True) for row in moved] or [Change(0, PARAMETERS, home, True)]
        kind = ENTER if step == 0 else EXIT if step == PHASE - 1 else CALL
        begins = {"name": f"phase {phase}"} if kind == ENTER else None
        cause = MOVE if changes else None
        writer.moment(
            kind, "Module.to", phase, changes or whole[: moment == 0], key=moment == 0, cause=cause, begins=begins
        )
    writer.close()
    return read_rank(sink.lines)


def answers(explorer: Explorer) -> dict[str, Callable[[int], object]]:
    """What a reader does, each time a little otherwise."""
    words = ("q_proj", "layers.7", "*.mlp.*", "down_proj", "layers.1?.", "gate")
    return {
        "a moment": lambda n: explorer.choose(moment=(n * 37) % MOMENTS),
        "a filter": lambda n: explorer.choose(pattern=words[n % len(words)]),
        "no filter": lambda n: explorer.choose(pattern="", moment=n),
        "a phase": lambda n: explorer.choose(phase=n % (MOMENTS // PHASE) + 1),
        "a rank": lambda n: explorer.choose(phase=None, rank=n % 2),
        "the other run": lambda n: explorer.choose(run=n % 2),
        "a tensor": lambda n: (explorer.choose(tensor=names()[n * 797]), explorer.to_svg()),
    }


def measure(scattered: bool) -> dict[str, dict[str, float]]:
    runs = [Trace({rank: story(rank, scattered, seed + rank) for rank in range(2)}) for seed in (0, 10)]
    begun = time.process_time()
    explorer = explore(*runs)
    panes(explorer)
    found = {"opening": {"first": time.process_time() - begun}}
    for name, answer in answers(explorer).items():
        took = []
        for n in range(12):
            begun = time.process_time()
            answer(n)
            panes(explorer)
            took.append(time.process_time() - begun)
        found[name] = {"first": max(took[:6]), "again": statistics.median(took[6:])}
        explorer.choose(run=0, rank=0, phase=None, pattern="", tensor="")
    return found


def panes(explorer: Explorer) -> None:
    state_pane(explorer.shown)
    cause_pane(explorer.shown.moments[0])


def main() -> None:
    results = {}
    for name, scattered in (("the whole model moves", False), ("a tenth lives by itself", True)):
        results[name] = measure(scattered)
        print(name)
        for answer, took in results[name].items():
            slow = " over the limit" if answer != "opening" and max(took.values()) > LIMIT else ""
            print(f"  {answer:14} " + "  ".join(f"{when} {s * 1000:6.0f} ms" for when, s in took.items()) + slow)
    print(json.dumps({"parameters": PARAMETERS, "moments": MOMENTS, "seconds": results}))


if __name__ == "__main__":
    main()
