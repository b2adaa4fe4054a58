"""Traces come from strangers: whatever is in them, the answer is a result, a stated omission, or one clear error."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from traces import Rank, on

from diagkit.cli import main
from diagkit.diagnosis import diagnose
from diagkit.trace import Trace, open_trace, reader
from diagkit.trace.compare import compare
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, MARK, PARAMETER, Failure, Header, Row
from diagkit.trace.table import ResidencyTable
from diagkit.trace.writer import MemorySink, TraceWriter

HERE = pathlib.Path(__file__).parent
COMMANDS = [["diagnose"], ["diagnose", "--json"], ["export", "--to", "csv", "-o", "out"], ["compare"]]


def told(rank: int = 0, ranks: int = 1, names: Sequence[str] = ("a.0.w", "a.1.w")) -> Rank:
    rank_of = Rank(names, rank, ranks)
    write = rank_of.writer.moment
    write(ENTER, "save: enter", 1, rank_of.parameters(on("cpu", True)), key=True, begins={"name": "save"})
    write(CALL, "Module.to", 1, rank_of.parameters(on("npu:0", True, "cpu")))
    write(EXIT, "save: exit", 1, [])
    rank_of.writer.close()
    return rank_of


def lines(**header: Any) -> list[bytes]:
    """A rank's lines; its header says this as well."""
    first, *rest = told().sink.lines
    return [json.dumps(json.loads(first) | header).encode() + b"\n", *rest]


def folder(place: pathlib.Path, *files: list[bytes]) -> pathlib.Path:
    place.mkdir(exist_ok=True)
    for rank, its in enumerate(files):
        (place / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(its))
    return place


# ---- many cases


def test_damaged_traces_of_every_kind_end_in_a_result_or_one_error(tmp_path: pathlib.Path) -> None:
    """A short run; ``python tests/fuzz.py --count 10000 TRACE`` is the long one. Memory has an end in there."""
    two = folder(tmp_path / "two", told(0, 2).sink.lines, told(1, 2).sink.lines)
    one = folder(tmp_path / "one", told(names=[f"l.{i}.w" for i in range(40)]).sink.lines)
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), "--count", "150", str(two), str(one)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "150 cases in" in done.stdout and "0 faults" in done.stdout
    assert "read with problems stated" in done.stdout


# ---- files


def link_out(place: pathlib.Path) -> None:
    (place / "rank-00001.jsonl").symlink_to("/etc/passwd")


def fifo(place: pathlib.Path) -> None:
    os.mkfifo(place / "rank-00001.jsonl")


def a_folder(place: pathlib.Path) -> None:
    (place / "rank-00001.jsonl").mkdir()


def nothing_in_it(place: pathlib.Path) -> None:
    (place / "rank-00001.jsonl").write_bytes(b"")


def something_else(place: pathlib.Path) -> None:
    (place / "rank-00001.jsonl").write_bytes(bytes(range(256)) * 100)


FILES: list[tuple[Callable[[pathlib.Path], None], str]] = [
    (link_out, "rank-00001.jsonl: a link, not followed"),
    (fifo, "rank-00001.jsonl: no regular file"),
    (a_folder, "rank-00001.jsonl: no regular file"),
    (nothing_in_it, "rank-00001.jsonl: holds no trace"),
    (something_else, "rank-00001.jsonl: holds no trace"),
]


@pytest.mark.parametrize(("make", "stated"), FILES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_file_that_is_none_is_stated_and_the_others_are_read(
    tmp_path: pathlib.Path, make: Callable[[pathlib.Path], None], stated: str
) -> None:
    place = folder(tmp_path / "run", told(0, 2).sink.lines)
    make(place)
    trace = open_trace(place)
    assert list(trace.ranks) == [0] and stated in trace.problems


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc/self/mem", "fifo", "gone", "x" * 5000, "a\0b", "~"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_path_that_is_no_trace_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: list[str], path: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    words = [command[0], path, *([path] if command[0] == "compare" else []), *command[1:]]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and len(said.err) < 600
    assert f"diagkit {command[0]}: error: " in said.err


def test_a_file_that_grows_faster_than_it_is_read_is_read_as_far_as_it_went(tmp_path: pathlib.Path) -> None:
    place = folder(tmp_path / "run", told().sink.lines)
    path = place / "rank-00000.jsonl"
    end = threading.Event()

    def grow() -> None:
        with path.open("ab") as file:
            while not end.is_set():
                file.write(b'{"ev":"trouble","seq":1,"where":"x","error":"' + b"x" * 100_000 + b'"}\n')

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        trace = open_trace(place)
    finally:
        end.set()
        writer.join()
    assert len(trace[0].moments) == 3


# ---- what a header claims


def test_a_rank_beyond_its_world_is_left_out_and_said(tmp_path: pathlib.Path) -> None:
    place = folder(tmp_path, lines(world_size=2), lines(rank=7, world_size=2))
    trace = open_trace(place)
    assert list(trace.ranks) == [0]
    assert "rank-00001.jsonl: says that it is rank 7 of 2; left out" in trace.problems


CLAIMS: list[dict[str, Any]] = [
    {"world_size": 2**31 - 1},
    {"world_size": 10**40},
    {"schema": 99},
    {"schema": "1"},
    {"run": "x" * 3_000_000},
    {"argv": ["x" * 1000] * 5000},
    {"job": {"diagkit.ranks": ",".join(["0-999999999"] * 20_000)}, "world_size": 2**31 - 1},
    {"job": {"diagkit.ranks": "9" * 5000}},
    {"job": {"a": [[[[[[[[[[1]]]]]]]]]]}},
    {"device_index": 10**30},
    {"torch": {"a": 1}, "host": None, "simulated": 3},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: next(iter(claim)))
def test_what_a_header_claims_costs_nothing(tmp_path: pathlib.Path, claim: dict[str, Any]) -> None:
    trace = open_trace(folder(tmp_path, lines(**claim)))
    shown = [repr(trace), str(trace), repr(diagnose(trace)), repr(trace.redacted()), *trace.problems[:20]]
    assert all(len(text) < 20_000 for text in shown)
    assert len(trace[0].moments) == 3


# ---- memory


def test_records_fill_no_more_than_their_share_of_memory() -> None:
    """Over all ranks together, and it is said where reading stopped."""
    moment = '{"ev":"moment","seq":%d,"ph":0,"kind":"mark","label":"x","d":[0,2,1,0]}\n'
    endless = [*told().sink.lines[:-1], *((moment % number).encode() for number in range(9, 2000))]
    cache = reader.TableCache(room=1_000_000)
    first, second = (reader.read_rank(its, cache=cache) for its in (endless, lines(rank=1)))
    assert 100 < len(first.moments) < 1000 and len(second.moments) == 0
    assert all("it is not read: the records fill" in " ".join(rank.problems) for rank in (first, second))
    assert diagnose(Trace({0: first})).problems == ()


@pytest.mark.parametrize("key", [b"", b'"key":1,'])
def test_many_moments_that_change_all_rows_are_read_up_to_a_point(monkeypatch: pytest.MonkeyPatch, key: bytes) -> None:
    """A few bytes may touch a million rows, again and again."""
    monkeypatch.setattr(reader, "TOUCHES", 100_000)
    wide = told(names=[f"l.{i}.w" for i in range(1000)]).sink.lines[:-1]
    moment = b'{"ev":"moment","seq":%d,"ph":0,"kind":"mark",' + key + b'"label":"x","d":[0,1000,%d,0]}\n'
    rank = reader.read_rank([*wide, *(moment % (n, 1 + n % 2) for n in range(9, 1000))])
    assert 40 < len(rank.moments) < 110
    assert "it is not read: its changes touch more than 100,000 rows" in " ".join(rank.problems)
    assert diagnose(rank).codes


def test_many_failures_of_one_endless_word_are_compared_within_a_tests_time() -> None:
    """Normalised in the time of their length squared, they would take longer than a test may."""
    rank = Rank(["a.0.w"])
    rank.writer.moment(MARK, "start", 0, rank.parameters(on("cpu", True)), key=True)
    for _ in range(1_500):
        rank.writer.moment(FAILURE, "failed", 0, [], failure=Failure("RuntimeError", "a" * 4_000, "f"))
    first, second = (Trace({0: reader.read_rank(rank.sink.lines)}) for _ in range(2))
    assert len(first[0].failures) == 1_500 and compare(first, second).equal


@pytest.mark.parametrize("text", [b"{},", b'"ab",', b"[[]],", b"1.5,", b'{"a":{}},'])
def test_a_line_full_of_small_things_stays_within_512_mb(tmp_path: pathlib.Path, text: bytes) -> None:
    first, *rest = lines()
    line = b'{"ev":"moment","seq":3,"d":[' + text * ((reader.LINE_LIMIT - 100) // len(text)) + b"0]}\n"
    place = folder(tmp_path, [first, *rest[:2], line, *rest[2:]])
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)\n"
        "from diagkit.cli import main; sys.exit(main(['diagnose', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], cwd=HERE.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr  # the finding is told all the same
    assert "DK101" in done.stdout and "skipped" in done.stdout and done.stderr == ""


def test_a_table_is_split_before_its_line_is_too_long_for_a_reader(tmp_path: pathlib.Path) -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="wide"))
    names = [f"model.layers.{i}.experts.{'x' * 200}.weight" for i in range(50_000)]
    writer.table([Row(i, PARAMETER, "model", name) for i, name in enumerate(names)], [(1,)] * len(names))
    writer.close()
    assert max(map(len, sink.lines)) < reader.LINE_LIMIT
    trace = reader.read_rank(sink.lines)
    assert trace.problems == [] and [row.name for row in trace.rows] == names
    assert len(trace.local_shapes) == len(names)


def test_records_of_another_kind_than_their_rows_are_passed_over() -> None:
    """A parameter with the record of a group, a group with that of a tensor, an engine with that of an optimizer."""
    events = [json.loads(line) for line in told().sink.lines]
    first = next(event for event in events if event.get("key"))
    for number, its in enumerate(({"is": "group", "offload": True}, {"is": "engine"}, {"is": "optimizer", "dead": 1})):
        for count in (1, 5):
            first["facts"]["1"] = its
            first["d"] = [number, count, 1, 0]
            diagnose(reader.read_rank(json.dumps(event).encode() + b"\n" for event in events))
    first["facts"]["1"] = {"is": "tensor", "metadata_device": "meta", "storage_device": "cpu"}
    first["d"] = [0, 5, 1, 0]
    assert diagnose(reader.read_rank(json.dumps(event).encode() + b"\n" for event in events)).blind == ""


# ---- names

HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\x1b[2J\x1b[31m", "\u202egnp.exe\u2066",
    "=1+1", "a" * 100_000, "a." * 50_000, "{0..99999999}", "{" * 1000, "\\" * 1000, "\u2028\u2029", "[exp_avg]",
]  # fmt: skip


def test_names_are_shown_as_what_they_are_and_do_nothing(tmp_path: pathlib.Path) -> None:
    trace = open_trace(folder(tmp_path, told(names=HOSTILE).sink.lines))
    findings = diagnose(trace)
    table = ResidencyTable.at(trace[0], -1)
    texts = [repr(findings), str(findings[0]), str(trace), str(table), repr(trace.compare(trace))]
    for text in texts:
        assert not [c for c in text if c in "\x1b\u202e\u2066\u2028\u2029" or (ord(c) < 32 and c != "\n")]
        assert len(text) < 20_000 and max(map(len, text.splitlines())) < 1500
    for html in (findings._repr_html_(), trace._repr_html_(), table._repr_html_()):
        assert "<script" not in html and "<img" not in html
    assert "names of more than 1000 characters are cut" in trace.problems[0]


def test_a_picture_with_absurd_names_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from diagkit.views import residency_map
    from diagkit.views.scene import shorten, text_width

    assert "</script" not in residency_map(open_trace(folder(tmp_path, told(names=HOSTILE).sink.lines))).to_html()
    for text in ("a" * 1_000_000, "model.layers.0.self_attn.q_proj.weight", "l" * 300, "W" * 300):
        short = shorten(text, 120, 12)
        assert "…" in short and 60 < text_width(short, 12) <= 120


def test_a_forged_hash_renames_nobody_elses_rows(tmp_path: pathlib.Path) -> None:
    """Whoever comes second may share the first one's table only if the hash is that of the names."""
    honest, forged = told(0, 2).sink.lines, [json.loads(line) for line in told(1, 2).sink.lines]
    forged[1]["names"] = ["mine.0", "mine.1"]
    # The forged one is read first: its file has the lower number.
    trace = open_trace(folder(tmp_path, [json.dumps(event).encode() + b"\n" for event in forged], honest))
    assert [row.name for row in trace[0].rows[:2]] == ["a.0.w", "a.1.w"]
    assert [row.name for row in trace[1].rows[:2]] == ["mine.0", "mine.1"]
    assert any("does not fit its names" in problem for problem in trace[1].problems)
