"""A thousand ranks are diagnosed by what differs, and the findings are those of looking at every row of every rank."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import SPLIT_MESSAGE, decoder_names, engine_trace, on

from diagkit.diagnosis import diagnose
from diagkit.diagnosis import judge as judging
from diagkit.diagnosis.fold import Fold, Table, fold
from diagkit.trace import RankTrace, Trace, open_trace, read_rank
from diagkit.trace.schema import (
    BUFFER,
    CALL,
    ENGINE,
    ENTER,
    EXIT,
    FAILURE,
    GRADIENT,
    GROUP,
    MARK,
    OPTIMIZER_STATE,
    PARAMETER,
    Cause,
    Change,
    EngineFacts,
    Facts,
    Failure,
    Frame,
    GroupFacts,
    Header,
    Residency,
    Row,
)
from diagkit.trace.writer import MemorySink, TraceWriter

BENCHMARKS = pathlib.Path(__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def scale() -> Iterator[object]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import scale as benchmark

        yield benchmark
    finally:
        sys.path.remove(str(BENCHMARKS))


def every_row(trace: RankTrace, table: Table) -> Fold:
    """Folds nothing: each row stands for itself."""
    return Fold(trace, "".join(map(chr, range(len(trace.rows)))))


def told(trace: Trace | RankTrace) -> str:
    return json.dumps(diagnose(trace).to_json())


def plainly(trace: Trace | RankTrace) -> str:
    """The findings of a judge that looks at every row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "fold", every_row)
        return told(trace)


# ---- lives of every kind

TENSORS: list[Residency] = [
    on("cpu", True), on("cpu"), on("npu:0"), on("meta"), on("npu:0", True, "cpu"), on("cpu", False, "npu:0"),
    on("cpu", True, empty=True), Residency("npu:0", "cpu", pinned=True, aliased=False, flat_device="cpu"),
    Residency("cpu", "cpu"), Residency("npu:0", "npu:0", shares="tie"), on("cpu", True, requires_grad=True),
]  # fmt: skip
GROUPS = [
    GroupFacts(True, True, "CPUOffloadPolicy", mesh_device="npu", parameters=2),
    GroupFacts(True, False, "CPUOffloadPolicy", mesh_device="npu", parameters=2, lazy_init="unfinished", root=True),
    GroupFacts(False, False, "OffloadPolicy", mesh_device="npu", parameters=2, training_state="post_backward"),
]
ENGINES = [EngineFacts("FSDPEngine"), EngineFacts("FSDPEngine", "True", True, "True", "False")]
MESSAGES = [
    SPLIT_MESSAGE,
    "Expected all tensors to be on the same device",
    "FSDP parameters should be materialized on CPU when enabling CPU offloading",
    "boom",
]
MOVE = Cause("Module._apply", ("Module.to",), Frame("engine.py", 41, "save"))


def rows(layers: int, late: bool) -> list[Row]:
    """Parameters and buffers of layers, their groups, gradients and optimizer states, and perhaps a parameter more."""
    named = [(PARAMETER, f"l.{i}.{w}", "") for i in range(layers) for w in "ab"] + [(BUFFER, "l.0.buf", "")]
    named += [(GROUP, name, "") for name in ("", *(f"l.{i}" for i in range(0, layers, 2)))] + [(ENGINE, "engine", "")]
    named += [(PARAMETER, "adapter.w", "")] * late
    found = [Row(i, kind, "model", name, part, (4, 4)) for i, (kind, name, part) in enumerate(named)]
    parameters = [row for row in found if row.kind == PARAMETER]
    dependents = [(GRADIENT, p, "") for p in parameters] + [
        (OPTIMIZER_STATE, p, part) for p in parameters for part in ("exp_avg", "step")
    ]
    first = len(found)
    found += [Row(first + i, kind, "model", p.name, part, (4, 4), p.id) for i, (kind, p, part) in enumerate(dependents)]
    return found


def facts_of(kind: str) -> list[Facts]:
    return list({GROUP: GROUPS, ENGINE: ENGINES}.get(kind, TENSORS))


@st.composite
def lives(draw: st.DrawFn, rank: int = 0, ranks: int = 1) -> RankTrace:
    """Any life: runs of rows change at random calls, phases fail and end, states are written whole now and then."""
    table = rows(draw(st.integers(1, 4)), draw(st.booleans()))
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="any", rank=rank, world_size=ranks, device="npu", backends="cpu:gloo"))
    start = 0
    for i in range(1, len(table) + 1):
        if i == len(table) or table[i].kind != table[start].kind:
            writer.table(table[start:i])
            start = i
    state: dict[int, Facts] = {}
    for phase, name in enumerate(draw(st.lists(st.sampled_from(["init", "train", "save", "load", ""]), max_size=5)), 1):
        inside = phase if name else 0
        if name:
            writer.moment(ENTER, f"{name}: enter", inside, [], begins={"name": name})
        for _ in range(draw(st.integers(0, 3))):
            changed: dict[int, Facts | None] = {}
            for _ in range(draw(st.integers(0, 4))):
                first = draw(st.integers(0, len(table) - 1))
                kind = table[first].kind
                now = draw(st.none() | st.sampled_from(facts_of(kind)))
                for row in table[first : first + draw(st.integers(1, 8))]:
                    if row.kind == kind:
                        changed[row.id] = now
            for row, facts in changed.items():
                if facts is None:
                    state.pop(row, None)
                else:
                    state[row] = facts
            key = draw(st.booleans())
            shown = state if key else changed
            changes = [Change(row, 1, 0 if f is None else writer.fact_id(f)) for row, f in sorted(shown.items())]
            failure = draw(st.none() | st.sampled_from(MESSAGES))
            writer.moment(
                FAILURE if failure else draw(st.sampled_from([CALL, MARK])), "call", inside, changes, key=key,
                cause=draw(st.none() | st.just(MOVE)),
                failure=Failure("RuntimeError", failure, "call") if failure else None,
            )  # fmt: skip
        if name:
            writer.moment(EXIT, f"{name}: exit", inside, [])
    writer.close()
    return read_rank(sink.lines)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rows_judged_together_give_the_findings_of_rows_judged_one_by_one(data: st.DataObject) -> None:
    trace = Trace({rank: data.draw(lives(rank, 2)) for rank in range(2)})
    assert told(trace) == plainly(trace)


@pytest.mark.parametrize("options", [{}, {"guarded": True}, {"heals": True}, {"fails": False}], ids=str)
def test_engines_are_judged_alike(options: dict[str, bool]) -> None:
    trace = engine_trace(ranks=4, **options)  # type: ignore[arg-type]
    assert told(trace) == plainly(trace)


def test_a_run_with_other_odd_rows_on_every_rank_is_judged_alike(tmp_path: pathlib.Path, scale) -> None:  # type: ignore[no-untyped-def]
    scale.make(tmp_path, 6, 300, 40, 0.5)
    trace = open_trace(tmp_path)
    findings = diagnose(trace)
    assert {"DK101", "DK102", "DK701"} <= set(findings.codes)
    assert told(trace) == plainly(trace)
    [split] = [f for f in findings if f.code == "DK101"]
    assert split.ranks == (0, 1, 2)
    assert len(split.names) == 300  # each rank's odd rows are split whole on some other rank


# ---- what it costs


def test_ten_thousand_parameters_that_moved_together_are_a_handful_of_rows() -> None:
    rank = engine_trace(decoder_names(1111))[0]
    folded = fold(rank, Table(rank.rows))
    assert len(rank.rows) > 10_000 and len(folded.trace.rows) <= 8
    assert list(folded.spans([0])) == [(0, len(decoder_names(1111)))]


def test_a_row_that_lived_otherwise_stands_by_itself(tmp_path: pathlib.Path, scale) -> None:  # type: ignore[no-untyped-def]
    scale.make(tmp_path, 1, 1000, 40, 1.0)
    rank = open_trace(tmp_path)[0]
    folded = fold(rank, Table(rank.rows))
    sizes = sorted(sum(b - a for a, b in folded.spans([n])) for n in range(len(folded.trace.rows)))
    assert sizes[-2:] == [144, 990] and sum(sizes) == len(rank.rows)


def test_ranks_share_what_is_equal_in_memory(tmp_path: pathlib.Path, scale) -> None:  # type: ignore[no-untyped-def]
    scale.make(tmp_path, 24, 2000, 40, 1.0)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rank-00000.jsonl").write_bytes((tmp_path / "rank-00000.jsonl").read_bytes())
    sizes = []
    for folder in (tmp_path / "one", tmp_path):
        tracemalloc.start()
        trace = open_trace(folder)
        diagnose(trace)
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len({id(rank.rows) for rank in trace}) == 1
    assert (sizes[1] - sizes[0]) / 23 < 400_000  # bytes a further rank; its 2,000 rows alone would be more


def test_local_shapes_are_kept_short_and_read_by_row(tmp_path: pathlib.Path, scale) -> None:  # type: ignore[no-untyped-def]
    scale.make(tmp_path, 2, 500, 40, 0.0)
    first, second = open_trace(tmp_path)
    assert len(first.local_shapes) == 500 and first.local_shapes != second.local_shapes
    assert all(shape == first.local_shapes[row] for row, shape in first.local_shapes.items())
    assert {shape[1] for shape in first.local_shapes.values() if shape} == {1024 * n for n in range(1, 8)}
    with pytest.raises(KeyError):
        first.local_shapes[500]


def test_a_long_reading_is_told_on_stderr_alone(tmp_path: pathlib.Path, scale) -> None:  # type: ignore[no-untyped-def]
    scale.make(tmp_path, 70, 7, 40, 0.0)
    root = pathlib.Path(__file__).parent.parent
    command = [sys.executable, "-S", "-m", "diagkit", "diagnose", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["findings"] == []
    assert done.stderr.splitlines()[-1] == "read 70 of 70 ranks"
