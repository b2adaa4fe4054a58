"""What the writer is told, the reader says: any rows, any changes, any loss in between."""

from __future__ import annotations

import warnings
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diagkit.trace import read_rank
from diagkit.trace.schema import (
    BUFFER,
    CALL,
    MARK,
    PARAMETER,
    Cause,
    Change,
    EngineFacts,
    Facts,
    Failure,
    Frame,
    GroupFacts,
    Header,
    OptimizerFacts,
    Residency,
    Row,
    facts_from_json,
    facts_to_json,
)
from diagkit.trace.writer import MemorySink, TraceWriter

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
RESIDENCIES = st.builds(
    Residency,
    metadata_device=st.sampled_from(["cpu", "npu:0", "npu:1", "meta"]),
    storage_device=st.sampled_from(["cpu", "npu:0", None]),
    dtype=st.sampled_from(["float32", "bfloat16", ""]),
    pinned=st.sampled_from([True, False, None]),
    wrapper=TEXT,
    shape_agrees=st.booleans(),
    empty=st.booleans(),
    requires_grad=st.booleans(),
    aliased=st.sampled_from([True, False, None]),
    shares=st.sampled_from([None, "tie", "parameter"]),
    unreadable=st.none() | TEXT,
)
GROUPS = st.builds(
    GroupFacts,
    offload=st.booleans(),
    policy=TEXT,
    mesh_size=st.integers(0, 10_000),
    parameters=st.integers(0, 10_000),
    root=st.sampled_from([True, False, None]),
    lazy_init=st.sampled_from(["no", "done", "unfinished"]),
    backward_pending=st.booleans(),
)
OPTIMIZERS = st.builds(
    OptimizerFacts,
    type=TEXT,
    parameters=st.integers(0, 99),
    dead=st.integers(0, 9),
    foreach=st.sampled_from([True, None]),
)
ENGINES = st.builds(EngineFacts, type=TEXT, uses_policy_flag=st.sampled_from(["True", "missing"]))
ANY: st.SearchStrategy[Facts] = st.one_of(RESIDENCIES, GROUPS, OPTIMIZERS, ENGINES)
FRAMES = st.builds(Frame, file=TEXT, line=st.integers(0, 1 << 30), function=TEXT, code=TEXT)
CAUSES = st.builds(
    Cause,
    operation=TEXT,
    chain=st.lists(TEXT, max_size=4).map(tuple),
    frame=st.none() | FRAMES,
    stack=st.lists(FRAMES, max_size=3).map(tuple),
    target=TEXT,
)
FAILURES = st.builds(Failure, type=TEXT, message=TEXT, operation=TEXT)


@given(ANY)
@settings(max_examples=300, deadline=None)
def test_facts_come_back_as_they_were(facts: Facts) -> None:
    assert facts_from_json(facts_to_json(facts)) == facts


class Losing(MemorySink):
    """Loses the lines whose turn is named."""

    def __init__(self, lost: set[int]) -> None:
        super().__init__()
        self.lost = lost
        self.turn = 0

    def write(self, line: bytes) -> None:
        self.turn += 1
        if self.turn - 1 in self.lost:
            raise OSError(28, "No space left on device")
        super().write(line)


def tell(sink: MemorySink, data: st.DataObject) -> tuple[list[Any], list[dict[int, tuple[Facts, int]]]]:
    """A random life; what each moment was told with, and the state after each, as a reader should find it."""
    writer = TraceWriter(sink, Header(run="round"))
    count = 0
    truth: dict[int, Facts] = {}
    generations: dict[int, int] = {}
    told: list[Any] = []
    states: list[dict[int, tuple[Facts, int]]] = []
    facts = data.draw(st.lists(ANY, min_size=1, max_size=5))
    causes = data.draw(st.lists(CAUSES, min_size=1, max_size=3))
    for turn in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0 if turn else 1, 1))):
            size = data.draw(st.integers(1, 12))
            kind = data.draw(st.sampled_from([PARAMETER, BUFFER]))
            shape = data.draw(st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple))
            writer.table(
                [Row(count + i, kind, "model", f"{data.draw(TEXT)}.{count + i}", shape=shape) for i in range(size)]
            )
            count += size
        changed: dict[int, tuple[Facts | None, bool]] = {}
        for row in data.draw(st.sets(st.integers(0, count - 1), max_size=count)):
            now = data.draw(st.none() | st.sampled_from(facts))
            exchanged = row in truth and now is not None and data.draw(st.booleans())
            changed[row] = (now, exchanged)
            if now is None:
                truth.pop(row, None)
            else:
                truth[row] = now
            generations[row] = generations.get(row, 0) + exchanged
        cause, failure = data.draw(st.none() | st.sampled_from(causes)), data.draw(st.none() | FAILURES)
        key = writer.wants_key()
        if key:
            moved = {row for row, (_, exchanged) in changed.items() if exchanged} | writer.unwritten_exchanges
            changes = [Change(row, 1, writer.fact_id(now), row in moved) for row, now in sorted(truth.items())]
        else:
            changes = [
                Change(row, 1, 0 if now is None else writer.fact_id(now), exchanged)
                for row, (now, exchanged) in sorted(changed.items())
            ]
        writer.moment(CALL if cause else MARK, str(turn), 0, changes, key=key, cause=cause, failure=failure)
        told.append((str(turn), cause, failure))
        states.append({row: (now, generations.get(row, 0)) for row, now in truth.items()})
    writer.close()
    return told, states


def read(sink: MemorySink) -> tuple[list[Any], list[dict[int, tuple[Facts, int]]], Any]:
    trace = read_rank(sink.lines)
    told = [(m.label, m.cause, m.failure) for m in trace.moments]
    states = []
    for moment in trace.moments:
        state = trace.state(moment)
        states.append({
            row: (trace.facts[number], state.generations[row]) for row, number in enumerate(state.facts) if number
        })  # fmt: skip
    return told, states, trace


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_life_comes_back_as_it_was(data: st.DataObject) -> None:
    sink = MemorySink()
    told, states = tell(sink, data)
    again, states_again, trace = read(sink)
    assert trace.problems == []
    assert again == told
    assert states_again == states


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_after_any_loss_the_next_line_that_arrives_tells_the_truth(data: st.DataObject) -> None:
    """But for exchanges of storages that came and went while nothing could be written, which count as one."""
    lost = data.draw(st.sets(st.integers(0, 30), max_size=12))
    sink = Losing(lost)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        told, states = tell(sink, data)
    again, states_again, trace = read(sink)
    assert len(warned) <= 1
    true = {label: state for (label, *_), state in zip(told, states, strict=True)}
    causes = {label: rest for label, *rest in told}
    for (label, *rest), state in zip(again, states_again, strict=True):
        assert rest == causes[label]
        assert {row: now for row, (now, _) in state.items()} == {row: now for row, (now, _) in true[label].items()}
        assert all(generation <= true[label][row][1] for row, (_, generation) in state.items())
    if warned and trace.moments and sink.turn - 1 not in lost and again and again[-1][0] == told[-1][0]:
        assert any("could not be written" in trouble for trouble in trace.troubles)
