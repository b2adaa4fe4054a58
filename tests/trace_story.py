"""A small life of a model, told through the public writer; without torch."""

from __future__ import annotations

from collections.abc import Iterator

from diagkit.trace.schema import (
    CALL,
    ENTER,
    EXIT,
    FAILURE,
    MARK,
    OPTIMIZER_STATE,
    PARAMETER,
    Cause,
    Change,
    Failure,
    Frame,
    Header,
    Residency,
    Row,
)
from diagkit.trace.writer import MemorySink, TraceWriter

HEALTHY = Residency(
    "cpu", "cpu", dtype="float32", storage_dtype="float32", pinned=True, wrapper="DTensor", aliased=True
)
SPLIT = Residency(
    "npu:0", "cpu", dtype="float32", storage_dtype="float32", pinned=True, wrapper="DTensor", aliased=True
)
STATE = Residency("cpu", "cpu", dtype="float32", storage_dtype="float32")
NAMES = [f"layers.{i}.weight" for i in range(5)]


def mover(line: int) -> Cause:
    """The call on that line of somebody's engine."""
    frame = Frame("/srv/job/engine.py", line, "save_checkpoint", 'module.to("npu")')
    return Cause("Module._apply", ("save_checkpoint", "Module.to"), frame, (frame,), "model")


def events(writer: TraceWriter) -> Iterator[str]:
    """Writes event by event, and says between them which one comes next."""
    yield "table"
    writer.table([Row(i, PARAMETER, "model", name, shape=(4, 4)) for i, name in enumerate(NAMES)], [(2, 4)] * 5)
    yield "start"
    writer.moment(MARK, "start", 0, [Change(0, 5, writer.fact_id(HEALTHY))], key=True)
    yield "train: enter"
    writer.moment(ENTER, "train: enter", 1, [], begins={"name": "train", "parent": 0, "label": ""})
    yield "states"
    writer.table([Row(5 + i, OPTIMIZER_STATE, "model", name, "exp_avg", (4, 4), i) for i, name in enumerate(NAMES)])
    yield "step"
    writer.moment(CALL, "Optimizer.step", 1, changes(writer, [Change(5, 5, writer.fact_id(STATE))]), key=key(writer))
    yield "train: exit"
    writer.moment(EXIT, "train: exit", 1, changes(writer, []), key=key(writer), calls={"Optimizer.step": 3})
    yield "save: enter"
    begins = {"name": "save", "parent": 0, "label": "Engine.save_checkpoint"}
    writer.moment(ENTER, "save: enter", 2, changes(writer, []), key=key(writer), begins=begins)
    yield "move"
    split = [Change(0, 5, writer.fact_id(SPLIT), exchanged=True)]
    writer.moment(CALL, "Module.to", 2, changes(writer, split), key=key(writer), cause=mover(41))
    yield "failure"
    failure = Failure("RuntimeError", "Attempted to set the storage", "Module.state_dict")
    writer.moment(FAILURE, "failed", 2, changes(writer, []), key=key(writer), cause=mover(43), failure=failure)
    yield "save: exit"
    writer.moment(EXIT, "save: exit", 2, changes(writer, []), key=key(writer))
    yield "end"
    writer.close()


def key(writer: TraceWriter) -> bool:
    """As a recorder does: a whole state where the writer asks for one."""
    return writer.wants_key()


def changes(writer: TraceWriter, difference: list[Change]) -> list[Change]:
    """The difference, or the whole state where the writer wants it."""
    told: dict[int, Change] = getattr(writer, "told", {})
    for change in difference:
        for row in range(change.start, change.start + change.count):
            told[row] = Change(row, 1, change.facts, change.exchanged)
    writer.told = {row: Change(row, 1, c.facts) for row, c in told.items()}  # type: ignore[attr-defined]
    if not writer.wants_key():
        return difference
    if not told:  # what `start` told, where that was before this was asked first
        told = {row: Change(row, 1, writer.fact_id(HEALTHY)) for row in range(5)}
    for row in range(5):
        told.setdefault(row, Change(row, 1, writer.fact_id(HEALTHY)))
    lost = writer.unwritten_exchanges
    return [Change(row, 1, c.facts, c.exchanged or row in lost) for row, c in sorted(told.items())]


def lines(rank: int = 0, world: int = 1, run: str = "story") -> list[bytes]:
    """The whole story of one rank."""
    sink = MemorySink()
    writer = TraceWriter(
        sink, Header(run=run, rank=rank, world_size=world, torch="2.13.0", device="npu", simulated=True)
    )
    for _ in events(writer):
        pass
    return sink.lines
