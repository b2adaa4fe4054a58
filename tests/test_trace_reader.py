"""The reader trusts nothing: it opens whatever a killed, broken or hostile process left, and says what it skipped."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_story import HEALTHY, NAMES, SPLIT, lines

from diagkit.errors import TraceError
from diagkit.trace import RankTrace, open_trace, read_rank
from diagkit.trace.reader import LINE_LIMIT, read_file
from diagkit.trace.schema import ABSENT, FAILURE, PARAMETER

STORY = lines()
EVENTS: list[dict[str, Any]] = [json.loads(line) for line in STORY]


def parsed(events: list[Any]) -> RankTrace:
    return read_rank(line if isinstance(line := event, bytes) else dump(event) for event in events)


def dump(event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"


def use(trace: RankTrace) -> None:
    """What any reader of a trace does with it; must work on whatever was read."""
    for moment in trace.moments:
        state = trace.state(moment)
        assert len(state.facts) == len(trace.rows) == len(state.generations)
        assert all(0 <= number < len(trace.facts) for number in state.facts)
        assert moment.phase in trace.phases
        assert all(change.start + change.count <= len(trace.rows) for change in moment.changes)
    for transition in trace.transitions():
        assert transition.rows
    for row in trace.rows:
        assert row.label.encode() and (row.of is None or row.of < row.id)
    assert trace.last_phase.ordinal in trace.phases
    assert len(trace.problems) <= 51
    json.dumps(trace.problems).encode()


# ---- cut anywhere


def test_cut_at_every_byte_it_opens_and_loses_its_last_line_alone() -> None:
    data = b"".join(STORY)
    ends = [0]
    for line in STORY:
        ends.append(ends[-1] + len(line))
    phases = {"": "outside any phase", "train": "in phase 1 (train)", "save": "in phase 2 (save)"}
    for cut in range(1, len(data)):
        trace = read_rank(data[:cut].splitlines(keepends=True))
        whole = sum(end <= cut for end in ends) - 1
        moments = sum(event["ev"] == "moment" for event in EVENTS[:whole])
        assert len(trace.moments) == moments, cut
        assert trace.ended is None
        name = [e for e in EVENTS[:whole] if e["ev"] == "moment"]
        inside = "" if not name or name[-1]["kind"] == "exit" else {0: "", 1: "train", 2: "save"}[name[-1]["ph"]]
        assert trace.problems[-1] == f"rank 0 was cut off {phases[inside]}: no closing line"
        torn = cut not in ends
        assert len(trace.problems) == 1 + torn, cut
        use(trace)


def test_a_whole_trace_has_no_problem() -> None:
    trace = read_rank(STORY)
    assert trace.problems == []
    assert (trace.ended, trace.last_phase.ordinal) == ("closed", 0)
    use(trace)


@pytest.mark.parametrize("number", range(1, len(STORY) - 1))
def test_a_line_that_is_damaged_costs_that_line(number: int) -> None:
    """What follows is read; only rows whose table is gone cannot come back."""
    damaged = [*STORY[:number], STORY[number][:20] + b"\xff\n", *STORY[number + 1 :]]
    trace = read_rank(damaged)
    use(trace)
    assert trace.ended == "closed"
    assert trace.problems[0].startswith(f"line {number + 1}: ")
    assert any("are missing" in problem for problem in trace.problems)
    if EVENTS[number]["ev"] == "moment":
        assert len(trace.moments) == sum(event["ev"] == "moment" for event in EVENTS) - 1


def test_facts_defined_in_a_damaged_line_come_back_with_the_next_whole_state() -> None:
    """The move's line defines the split's facts; a later whole state defines them again."""
    move = next(n for n, event in enumerate(EVENTS) if event.get("label") == "Module.to")
    again = copy.deepcopy(EVENTS)
    later = next(n for n, event in enumerate(again) if event.get("label") == "save: exit")
    again[later] |= {"key": 1, "d": [0, 5, 3, 0, 0, 5, 2, 0], "facts": again[move]["facts"]}
    del again[move]["facts"]
    trace = parsed(again)
    labels = [moment.label for moment in trace.moments]
    before, after = (trace.state(labels.index(label)) for label in ("save: enter", "Module.to"))
    assert (trace.facts[before.facts[0]], trace.facts[after.facts[0]]) == (HEALTHY, SPLIT)
    assert trace.facts[trace.state(-1).facts[0]] == SPLIT
    assert [problem for problem in trace.problems if "definition cannot be read" in problem]


# ---- hostile lines


def change(event: str, **values: Any) -> Callable[[list[Any]], None]:
    def apply(events: list[Any]) -> None:
        next(e for e in events if e["ev"] == event).update(values)

    return apply


def moment(**values: Any) -> Callable[[list[Any]], None]:
    def apply(events: list[Any]) -> None:
        next(e for e in events if e.get("label") == "Module.to").update(values)

    return apply


HUGE = 10**30
HOSTILE: list[tuple[str, Callable[[list[Any]], None], str]] = [
    ("unknown event", lambda e: e.insert(3, {"ev": "future", "seq": 3, "what": [1]}), "unknown event 'future'"),
    ("no event", lambda e: e.insert(3, {"seq": 3}), "unknown event None"),
    ("event of another type", lambda e: e.insert(3, {"ev": ["table"], "seq": 3}), "unknown event"),
    ("a list", lambda e: e.insert(3, [1, 2]), "expected an object, found list"),
    ("a number", lambda e: e.insert(3, 7), "expected an object, found int"),
    ("no JSON", lambda e: e.insert(3, b"hello\n"), "skipped"),
    ("binary", lambda e: e.insert(3, bytes(range(256)).replace(b"\n", b"") + b"\n"), "skipped"),
    ("a second header", lambda e: e.insert(3, dict(e[0], seq=3)), "a second header"),
    ("another schema", change("header", schema=99), "schema 99, this diagkit reads 1"),
    ("a huge rank", change("header", rank=HUGE), ""),
    ("a rank below zero", change("header", rank=-5), ""),
    ("a world of text", change("header", world_size="many"), ""),
    ("a header of lists", change("header", run=["x"], torch={}, argv="x", job=[1], simulated="yes"), ""),
    ("a huge sequence number", moment(seq=HUGE), "seq: expected a number"),
    ("a sequence number of text", moment(seq="7"), "seq: expected a number"),
    ("a sequence number that is true", moment(seq=True), "seq: expected a number"),
    ("a jump", lambda e: [x.update(seq=x["seq"] + 1000) for x in e[5:]], "1000 event(s) before it are missing"),
    ("backwards", moment(seq=0), "event 0 comes again or late"),
    ("rows that are not there", moment(d=[0, 10**6, 1, 0]), "a change of row 999999, there are 10"),
    ("rows beyond a huge gap", moment(d=[HUGE, 1, 1, 0]), "a change of row"),
    ("changes in threes", moment(d=[0, 1, 1]), "changes that are not groups of four numbers"),
    ("changes below zero", moment(d=[0, -1, 1, 0]), "changes that are not groups of four numbers"),
    ("changes of floats", moment(d=[0.0, 1.0, 1.0, 0.0]), "changes that are not groups of four numbers"),
    ("changes of text", moment(d="0110"), "d: expected a list"),
    ("facts that nobody defined", moment(d=[0, 1, 77, 0]), "facts 77 are used, but their definition cannot be read"),
    ("facts of an unknown kind", moment(facts={"9": {"is": "ghost"}}), "unknown kind of facts 'ghost'"),
    ("facts of a wrong type", moment(facts={"9": {"is": "tensor", "metadata_device": 3}}), "Residency.metadata_device"),
    ("facts without a device", moment(facts={"9": {"is": "tensor"}}), "facts 9: Residency"),
    ("facts under a word", moment(facts={"nine": {"is": "tensor", "metadata_device": "cpu"}}), "skipped"),
    ("facts that are a list", moment(facts=[1]), ""),
    ("facts with fields of tomorrow", moment(facts={"9": {"is": "tensor", "metadata_device": "cpu", "new": 1}}), ""),
    ("a cause that nobody defined", moment(cause=99), ""),
    ("a cause of text", moment(causes={"1": "me"}), "a cause that is no object"),
    ("a cause of wrong parts", moment(causes={"1": {"chain": 3, "frame": [], "stack": {"a": 1}, "operation": 5}}), ""),
    ("a line below zero", moment(causes={"1": {"frame": {"file": 3, "line": -HUGE}}}), ""),
    ("a failure of text", moment(failure="bad"), ""),
    ("an unknown kind of moment", moment(kind="dream"), "a moment of unknown kind 'dream'"),
    ("a phase below zero", moment(ph=-1), "ph: expected a number"),
    ("a phase that never began", moment(ph=50), ""),
    ("a phase inside itself", moment(ph=60, phase={"name": "x", "parent": 60}), ""),
    ("a phase in a later one", moment(ph=60, phase={"name": "x", "parent": 61}), ""),
    ("counts of text", moment(calls={"a": "b", "c": 2}), ""),
    ("time is text", moment(t="now", m=None), ""),
    ("time is not a number", moment(t=float("nan"), m=float("inf")), ""),
    ("a label of 10 MB", moment(label="x" * 10_000_000), ""),
    ("a label that is a list", moment(label=[[[]]]), ""),
    ("a table of an unknown kind", change("table", kind="soul"), "a table of unknown kind 'soul'"),
    ("a table elsewhere", change("table", base=5), "a table that starts at row 5, expected 0"),
    ("a table of numbers", change("table", names=[1, 2, 3, 4, 5]), "columns do not fit"),
    ("a table with a part too few", change("table", parts=["a"]), "columns do not fit"),
    ("a table with other names than its hash", change("table", names=list("abcde")), "does not fit its names"),
    ("owners that do not exist", change("table", of=[10**9, -1, "x", None, True]), ""),
    ("shapes of text", change("table", shapes="x"), "shapes that are not run lengths"),
    ("shapes of the wrong length", change("table", shapes=[[[4, 4]], [0, 3]]), "columns do not fit"),
    ("a shape that is not there", change("table", shapes=[[[4, 4]], [7, 5]]), "skipped"),
    ("run lengths of a billion", change("table", shapes=[[[4, 4]], [0, 10**9]]), "run lengths beyond the table"),
    ("shapes that are infinite", change("table", shapes=[[[float("inf")]], [0, 5]]), "skipped"),
    ("local shapes elsewhere", change("local", base=10**6), ""),
    ("local shapes below zero", change("local", shapes=[[[1]], [0, -5]]), "run lengths beyond the table"),
    ("trouble of lists", lambda e: e.insert(3, {"ev": "trouble", "seq": 3, "where": [1], "error": {}}), ""),
    ("a reason that is a dict", change("end", reason={"a": 1}), ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mutate", "told"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_a_hostile_line_is_told_and_the_rest_is_read(name: str, mutate: Callable[[list[Any]], None], told: str) -> None:
    events: list[Any] = copy.deepcopy(EVENTS)
    mutate(events)
    trace = parsed(events)
    use(trace)
    assert trace.ended is not None
    assert len(trace.moments) >= 7
    assert not told or any(told in problem for problem in trace.problems), trace.problems


def test_deep_nesting_is_skipped() -> None:
    deep = b'{"ev":"moment","seq":3,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    trace = read_rank([*STORY[:3], deep, *STORY[3:]])
    assert "line 4" in trace.problems[0] and trace.ended == "closed"
    use(trace)


def test_a_number_of_a_million_digits_is_skipped() -> None:
    line = b'{"ev":"moment","seq":' + b"9" * 1_000_000 + b"}\n"
    began = time.monotonic()
    trace = read_rank([*STORY[:3], line, *STORY[3:]])
    assert time.monotonic() - began < 2
    assert "line 4" in trace.problems[0] and trace.ended == "closed"


def test_memory_follows_the_file_and_no_number_in_it() -> None:
    events: list[Any] = copy.deepcopy(EVENTS)
    change("header", world_size=2**31 - 1, rank=2**31 - 2)(events)
    change("table", base=0, shapes=[[[2**52] * 3], [0, 5]])(events)
    moment(d=[0, 2**52, 1, 0, 2**52, 5, 2, 1], ph=2**52)(events)
    data = [dump(event) for event in events]
    tracemalloc.start()
    use(read_rank(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_a_line_that_never_ends_is_passed_over_unread(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    with path.open("wb") as file:
        file.writelines(STORY[:3])
        file.write(b'{"ev":"moment","label":"')
        file.seek(LINE_LIMIT + 1000, os.SEEK_CUR)  # a hole: nothing on the disk, zeros for a reader
        file.write(b'"}\n')
        file.writelines(STORY[3:])
    trace = read_file(path)
    assert trace.ended == "closed" and len(trace.moments) == 8
    assert "line 4" in trace.problems[0]


CONTROL = "\x1b[31mred\x07\x00\x9b\u202e"


def test_control_characters_and_broken_surrogates_reach_no_terminal() -> None:
    events: list[Any] = copy.deepcopy(EVENTS)
    moment(label=CONTROL + "\ud800", causes={"1": {"operation": "\udfff", "chain": ["a\x1b[0m"]}})(events)
    change("table", names=["a\x1b", "b", "c\ud912", "d", "e"])(events)
    change("end", reason="\x1b]0;owned\x07")(events)
    trace = parsed(events)
    texts = [m.label for m in trace.moments] + [row.name for row in trace.rows] + [str(trace.ended)]
    texts += [str(m.cause) for m in trace.moments if m.cause]
    for text in texts:
        text.encode("utf-8")
        assert not [c for c in text if ord(c) < 32 or 127 <= ord(c) < 160], text
    assert "red" in texts[4 + 1]


def test_honest_text_of_any_language_comes_through() -> None:
    from trace_story import events

    from diagkit.trace.schema import MARK, Header, Row
    from diagkit.trace.writer import MemorySink, TraceWriter

    name, label = "层.0.重み", "保存 😀 é"
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="rün"))
    writer.table([Row(0, PARAMETER, "model", name)])
    writer.moment(MARK, label, 0, [], key=True)
    writer.close()
    trace = read_rank(sink.lines)
    assert (trace.problems, trace.rows[0].name, trace.moments[0].label, trace.header.run) == ([], name, label, "rün")
    assert all(line.isascii() for line in sink.lines) and events


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_changed_at_random_break_nothing(data: st.DataObject) -> None:
    text = bytearray(b"".join(STORY))
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["change", "delete", "insert", "swap"]))
        if kind == "change":
            text[at] = data.draw(st.integers(0, 255))
        elif kind == "delete":
            del text[at : at + data.draw(st.integers(1, 200))]
        elif kind == "insert":
            text[at:at] = data.draw(st.binary(max_size=30))
        else:
            other = data.draw(st.integers(0, len(text) - 1))
            text[at], text[other] = text[other], text[at]
        if not text:
            break
    use(read_rank(bytes(text).splitlines(keepends=True)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_value_in_any_field_breaks_nothing(data: st.DataObject) -> None:
    events: list[Any] = copy.deepcopy(EVENTS)
    for _ in range(data.draw(st.integers(1, 4))):
        event = data.draw(st.sampled_from(events))
        event[data.draw(st.sampled_from(sorted(event)))] = data.draw(VALUES)
    use(parsed(events))


# ---- a folder


def put(
    folder: pathlib.Path, rank: int, world: int = 1, run: str = "story", name: str = "", **more: Any
) -> pathlib.Path:
    path = folder / (name or f"rank-{rank:05d}.jsonl")
    path.write_bytes(b"".join(lines(rank, world, run, **more)))
    return path


def test_ranks_are_merged_and_missing_ones_named(tmp_path: pathlib.Path) -> None:
    for rank in (0, 2, 5):
        put(tmp_path, rank, 8)
    trace = open_trace(tmp_path)
    assert [rank.rank for rank in trace] == [0, 2, 5]
    assert (len(trace), trace.world_size, trace.missing_ranks) == (3, 8, [1, 3, 4, 6, 7])
    assert trace.problems == ["no trace of 5 of 8 ranks: 1, 3, 4, 6, 7"]
    assert trace[2].rows == trace[0].rows
    assert repr(trace) == "<Trace story: 3 of 8 ranks, simulated npu, 10 rows, 24 moments, 3 failures>"
    with pytest.raises(TraceError, match="no such rank in this trace: found 1, expected one of 0, 2, 5"):
        trace[1]


def test_the_first_failure_is_that_of_the_earliest_phase(tmp_path: pathlib.Path) -> None:
    put(tmp_path, 0, 2)
    path = put(tmp_path, 1, 2)
    early = path.read_bytes().replace(b'"ph":1,"kind":"call"', b'"ph":1,"kind":"failure","failure":{"type":"OSError"}')
    path.write_bytes(early)
    found = open_trace(tmp_path).first_failure
    assert found is not None
    rank, failed = found
    assert (rank.rank, failed.kind, failed.failure.type) == (1, FAILURE, "OSError")  # type: ignore[union-attr]


def test_a_rank_that_was_killed_is_named_with_its_phase(tmp_path: pathlib.Path) -> None:
    put(tmp_path, 0, 2)
    path = put(tmp_path, 1, 2)
    path.write_bytes(b"".join(lines(1, 2)[:-3])[:-10])
    assert open_trace(tmp_path).problems == [
        "rank 1: line 10: the line is not finished (the process ended while writing it, or is still writing); skipped",
        "rank 1: rank 1 was cut off in phase 2 (save): no closing line",
    ]


def test_a_file_that_grows_is_read_as_far_as_it_goes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    seen = []
    for line in STORY:
        with path.open("ab") as file:
            file.write(line)
        if line is not STORY[0]:
            seen.append(len(open_trace(path)[0].moments))
    assert seen == sorted(seen) and seen[-1] == 8


def test_a_rank_that_is_there_twice_is_left_out_the_second_time(tmp_path: pathlib.Path) -> None:
    put(tmp_path, 0)
    put(tmp_path, 0, name="rank-0.jsonl")
    trace = open_trace(tmp_path)
    assert len(trace) == 1
    assert trace.problems == ["rank-00000.jsonl: rank 0 is there twice; left out"]


def test_of_two_runs_the_later_is_told(tmp_path: pathlib.Path) -> None:
    for rank in range(4):
        put(tmp_path, rank, 4, "old")
    time.sleep(0.01)
    for rank in range(2):
        put(tmp_path, rank, 2, "new")
    trace = open_trace(tmp_path)
    assert (trace.header.run, len(trace), trace.missing_ranks) == ("new", 2, [])
    assert trace.problems == ["files of 1 other run(s) in the folder are left out"]


def test_a_rank_without_its_header_is_known_by_its_files_name(tmp_path: pathlib.Path) -> None:
    for rank in range(3):
        put(tmp_path, rank, 3)
    path = tmp_path / "rank-00002.jsonl"
    path.write_bytes(b"x" * 30 + path.read_bytes())
    trace = open_trace(tmp_path)
    assert [rank.rank for rank in trace] == [0, 1, 2]
    assert trace[2].headless and len(trace[2].moments) == 8
    assert [p for p in trace.problems if "rank 2" in p][1] == "rank 2: the header is missing"


def test_links_pipes_and_folders_are_passed_over_and_named(tmp_path: pathlib.Path) -> None:
    put(tmp_path, 0)
    secret = tmp_path / "elsewhere.jsonl"
    secret.write_bytes(b"".join(lines(1)))
    (tmp_path / "rank-00001.jsonl").symlink_to(secret)
    os.mkfifo(tmp_path / "rank-00002.jsonl")
    (tmp_path / "rank-00003.jsonl").mkdir()
    (tmp_path / "rank-00004.jsonl").write_bytes(b"")
    (tmp_path / "rank-00005.jsonl").write_bytes(b"\n\n")
    (tmp_path / "notes.txt").write_text("not ours")
    trace = open_trace(tmp_path)
    assert len(trace) == 1
    assert trace.problems == [
        "rank-00001.jsonl: a link, not followed",
        "rank-00002.jsonl: no regular file",
        "rank-00003.jsonl: no regular file",
        "rank-00004.jsonl: holds no trace",
        "rank-00005.jsonl: holds no trace",
    ]


NO_TRACE: list[tuple[str, Callable[[pathlib.Path], pathlib.Path], str]] = [
    ("nothing there", lambda folder: folder / "gone", "no such file or folder"),
    ("an empty folder", lambda folder: folder, "no trace here: found no file named rank-"),
    ("a file of something else", lambda folder: write(folder / "rank-00000.jsonl", "hello\n"), "holds no trace"),
    ("a folder of such", lambda folder: write(folder / "rank-00000.jsonl", "hello\n").parent, "holds no trace"),
]


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "make", "message"), NO_TRACE, ids=[case[0] for case in NO_TRACE])
def test_what_is_no_trace_at_all_is_an_error(
    tmp_path: pathlib.Path, name: str, make: Callable[[pathlib.Path], pathlib.Path], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        open_trace(make(tmp_path))


def test_equal_tables_are_parsed_once_and_a_forged_hash_helps_nobody(tmp_path: pathlib.Path) -> None:
    """A table is taken by its hash only where that was checked; a wrong one cannot rename another rank's rows."""
    put(tmp_path, 0, 2)
    path = put(tmp_path, 1, 2)
    path.write_bytes(path.read_bytes().replace(b"layers.0.weight", b"layers.9.weight"))
    first = tmp_path / "first"
    first.mkdir()
    forged = first / "rank-00001.jsonl"
    forged.write_bytes(path.read_bytes())
    assert open_trace(tmp_path)[1].rows[0].name == "layers.0.weight"  # by the hash, which rank 0 had right
    alone = open_trace(first)[1]
    assert alone.rows[0].name == "layers.9.weight"
    assert "does not fit its names" in alone.problems[0]


# ---- what a trace says


def test_states_can_be_asked_for_in_any_order() -> None:
    trace, other = read_rank(STORY), read_rank(STORY)
    forward = [copy.deepcopy(trace.state(moment)) for moment in trace.moments]
    backward = [copy.deepcopy(other.state(moment)) for moment in reversed(other.moments)][::-1]
    assert forward == backward
    assert other.state(-1) == forward[-1]
    assert [state.facts[0] == ABSENT for state in forward] == [False] * 8
    assert [state.facts[5] == ABSENT for state in forward] == [True, True] + [False] * 6
    assert [state.generations[0] for state in forward] == [0] * 5 + [1] * 3


def test_a_state_that_was_handed_out_does_not_change() -> None:
    trace = read_rank(STORY)
    first = trace.state(0)
    kept = copy.deepcopy(first)
    trace.state(-1)
    first.facts[0] = 99
    assert trace.state(0) == kept


def test_rows_are_found_by_name() -> None:
    trace = read_rank(STORY)
    assert trace.row("layers.3.weight").id == 3
    assert trace.row("layers.3.weight", "optimizer_state", "exp_avg").of == 3
    assert trace.local_shapes[3] == (2, 4) and trace.rows[3].shape == (4, 4)
    with pytest.raises(KeyError, match="no buffer named 'x' in the trace of rank 0"):
        trace.row("x", "buffer")


def test_the_cause_reads_as_a_sentence() -> None:
    trace = read_rank(STORY)
    [moved] = trace.transitions()
    assert str(moved.cause) == "engine.py:41 save_checkpoint: save_checkpoint -> Module.to"
    assert {row.name for row in moved.rows} == set(NAMES)
    assert [m.failure.message for m in trace.failures if m.failure] == ["Attempted to set the storage"]
    assert trace.phases[2].failed and not trace.phases[1].failed
    assert trace.phases[1].calls == {"Optimizer.step": 3}
