"""The writer disturbs nobody: whatever becomes of the disk, the job goes on with one warning, and the trace heals."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
from trace_story import HEALTHY, NAMES, SPLIT, STATE, events, lines

from diagkit.errors import TraceError
from diagkit.trace import RankTrace, open_trace, read_rank
from diagkit.trace.schema import MARK, PARAMETER, Change, Header, Residency, Row
from diagkit.trace.writer import FileSink, MemorySink, TraceWriter

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = Header(run="story", torch="2.13.0", device="npu", simulated=True)


class Full(MemorySink):
    """Takes part of a line and then nothing, as a full disk does, for as long as ``full``."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.torn = b""

    def write(self, line: bytes) -> None:
        if self.full:
            self.torn = self.torn or line[: len(line) // 2]
            raise OSError(28, "No space left on device")
        self.lines.append(self.torn + b"\n" + line if self.torn else line)
        self.torn = b""


def read(sink: MemorySink) -> RankTrace:
    return read_rank(b"".join(sink.lines).splitlines(keepends=True))


def final(trace: RankTrace) -> dict[str, tuple[object, int]]:
    """Facts and storage generation of each row after the last moment."""
    state = trace.state(-1)
    return {row.label: (trace.facts[state.facts[row.id]], state.generations[row.id]) for row in trace.rows}


WHOLE = final(read_rank(lines()))
STEPS = list(events(TraceWriter(MemorySink(), HEADER)))


def test_the_story_is_what_the_tests_think() -> None:
    assert WHOLE["layers.0.weight"] == (SPLIT, 1)
    assert WHOLE["layers.4.weight [exp_avg]"] == (STATE, 0)
    trace = read_rank(lines())
    assert trace.problems == [] and trace.ended == "closed"
    assert [phase.name for phase in trace.phases.values()] == ["", "train", "save"]
    [moved] = trace.transitions()
    assert (moved.before, moved.after, moved.exchanged, len(moved.rows)) == (HEALTHY, SPLIT, True, 5)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("lost", STEPS[:-1])
def test_whatever_line_is_lost_the_end_is_known(lost: str, length: int) -> None:
    """The disk is full for one, two, four events, beginning anywhere."""
    sink = Full()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        writer = TraceWriter(sink, HEADER)
        full = range(STEPS.index(lost), STEPS.index(lost) + length)
        for number, _ in enumerate(events(writer)):
            sink.full = number in full
        assert len(warned) == 1 and "No space left on device" in str(warned[0].message)
    trace = read(sink)
    if STEPS[-1] in STEPS[full.start : full.stop]:
        assert trace.ended is None
        assert "was cut off" in trace.problems[-1]
        return
    assert trace.ended == "closed"
    if full.stop < STEPS.index("end"):
        assert final(trace) == WHOLE
    [told] = trace.troubles
    assert "could not be written (No space left on device)" in told
    assert any("event(s) before it are missing" in problem for problem in trace.problems)


def test_a_phase_whose_beginning_was_lost_keeps_its_name() -> None:
    sink = Full()
    with pytest.warns(RuntimeWarning):
        writer = TraceWriter(sink, HEADER)
        for name in events(writer):
            sink.full = name == "save: enter"
    phase = read(sink).phases[2]
    assert (phase.name, phase.label) == ("save", "Engine.save_checkpoint")


def test_a_lost_header_comes_first_when_there_is_space_again() -> None:
    sink = Full()
    sink.full = True
    with pytest.warns(RuntimeWarning):
        writer = TraceWriter(sink, HEADER)
        for _ in events(writer):
            sink.full = False
    trace = read(sink)
    assert trace.header.run == "story" and not trace.headless
    assert final(trace) == WHOLE


def test_warnings_that_are_errors_do_not_reach_the_job() -> None:
    sink = Full()
    writer = TraceWriter(sink, HEADER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in events(writer):
            sink.full = name == "move"
    assert read(sink).troubles


# ---- real files

SCRIPT = """
import json, os, sys, warnings
sys.path[:0] = [{root!r}, {tests!r}]
from trace_story import events
from diagkit.trace.schema import Header
from diagkit.trace.writer import TraceWriter
warnings.simplefilter("always")
said = []
warnings.showwarning = lambda message, *rest: said.append(str(message))
{before}
writer = TraceWriter.create({folder!r}, Header(run="story"))
for name in events(writer):
    {between}
print(json.dumps(said))
"""


def tell(folder: pathlib.Path, before: str = "", between: str = "pass") -> list[str]:
    """Tells the story in a process of its own; the warnings it gave."""
    code = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), folder=str(folder), before=before, between=between)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    said: list[str] = json.loads(result.stdout)
    return said


def test_a_file_at_its_size_limit_heals_when_the_limit_goes(tmp_path: pathlib.Path) -> None:
    """RLIMIT_FSIZE tears a line in the middle, as a full disk does (and Python ignores its signal)."""
    said = tell(
        tmp_path,
        before="import resource; none = resource.RLIM_INFINITY",
        between="""
    size = os.path.getsize(writer._sink.path)
    if name == "move": resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, none))
    if name == "save: exit": resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))
    """,
    )
    assert said == ["diagkit cannot write its trace (File too large); the job goes on, the trace has a gap"]
    trace = open_trace(tmp_path)[0]
    assert final(trace) == WHOLE
    assert trace.troubles == ["writer: 2 event(s) before this one could not be written (File too large)"]
    assert any("skipped" in problem for problem in trace.problems)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 64 KiB, where this user may mount one; otherwise one file that is always full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        (folder / "rank-00000.jsonl").symlink_to("/dev/full")
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_warning(small_disk: pathlib.Path) -> None:
    mounted = not (small_disk / "rank-00000.jsonl").is_symlink()
    if mounted:
        (small_disk / "other").write_bytes(b"x" * 64 * 1024)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        writer = TraceWriter.create(small_disk, HEADER)
        for name in events(writer):
            if mounted and name == "failure":
                (small_disk / "other").unlink()
    assert [str(w.message) for w in warned] == [
        "diagkit cannot write its trace (No space left on device); the job goes on, the trace has a gap"
    ]
    if mounted:
        trace = open_trace(small_disk)[0]
        assert final(trace) == WHOLE
        assert "No space left on device" in trace.troubles[0]


@pytest.mark.parametrize("again", [False, True], ids=["for good", "and made again"])
def test_a_folder_that_is_removed_is_one_warning(tmp_path: pathlib.Path, again: bool) -> None:
    folder = tmp_path / "trace"
    between = 'if name == "move": import shutil; shutil.rmtree(writer._sink.path.parent)'
    said = tell(folder, between=between + ("; os.mkdir(writer._sink.path.parent)" if again else ""))
    assert said == ["diagkit cannot write its trace (the file was removed); the job goes on, the trace has a gap"]
    assert folder.exists() == again and not list(folder.glob("*"))


def test_a_descriptor_that_the_job_closed_is_opened_again(tmp_path: pathlib.Path) -> None:
    said = tell(tmp_path, between='if name == "move": os.close(writer._sink._file)')
    assert said == ["diagkit: the job closed the trace's file; it was opened again; the job goes on"]
    trace = open_trace(tmp_path)[0]
    assert trace.problems == [] and final(trace) == WHOLE
    assert trace.troubles == ["writer: the job closed the trace's file; it was opened again"]


@pytest.mark.parametrize("moment", ["move", "end"])
def test_a_file_of_the_jobs_own_under_our_number_is_neither_written_nor_closed(
    tmp_path: pathlib.Path, moment: str
) -> None:
    theirs = tmp_path / "theirs"
    said = tell(
        tmp_path / "trace",
        between=f"""
    if name == {moment!r}:
        os.close(writer._sink._file)
        mine = os.open({str(theirs)!r}, os.O_WRONLY | os.O_CREAT)
        assert mine == writer._sink._file
    if name == {moment!r} and name == "end": pass
os.write(mine, b"all mine")
""",
    )
    assert len(said) == 1
    assert theirs.read_bytes() == b"all mine"
    assert open_trace(tmp_path / "trace")[0].ended == "closed"


def test_another_file_in_our_place_is_left_alone(tmp_path: pathlib.Path) -> None:
    between = """
    if name == "move":
        os.close(writer._sink._file); os.unlink(writer._sink.path)
        writer._sink.path.write_text("theirs")
"""
    said = tell(tmp_path, between=between)
    assert said == [
        "diagkit cannot write its trace (another file is in its place); the job goes on, the trace has a gap"
    ]
    assert (tmp_path / "rank-00000.jsonl").read_text() == "theirs"


def test_a_slow_disk_is_waited_for_and_told_once(tmp_path: pathlib.Path) -> None:
    """A pipe whose reader sleeps: the write blocks for as long as it takes."""
    pipe = tmp_path / "rank-00000.jsonl"
    os.mkfifo(pipe)
    got: list[bytes] = []

    def reader() -> None:
        with pipe.open("rb", buffering=0) as file:
            time.sleep(2.5)
            while part := file.read(1 << 16):
                got.append(part)

    thread = threading.Thread(target=reader)
    thread.start()
    with pytest.warns(
        RuntimeWarning, match=r"one write to the trace took \d\.\d s, and the job waited for it"
    ) as warned:
        writer = TraceWriter.create(tmp_path, HEADER)
        writer.trouble("filler", "x" * 1900)
        for _ in range(60):  # more than a pipe holds
            writer.trouble("filler", "x" * 1900)
        for _ in events(writer):
            pass
    thread.join()
    assert len(warned) == 1
    trace = read_rank(b"".join(got).splitlines(keepends=True))
    assert trace.problems == [] and final(trace) == WHOLE
    assert sum("the job waited" in trouble for trouble in trace.troubles) == 1


def test_an_interrupt_in_the_middle_of_a_line_is_the_jobs_and_costs_no_other_line(tmp_path: pathlib.Path) -> None:
    """The writer stands in a full pipe when the user's Ctrl-C comes."""
    pipe = tmp_path / "rank-00000.jsonl"
    os.mkfifo(pipe)
    got: list[bytes] = []
    struck = threading.Event()

    def reader() -> None:
        with pipe.open("rb", buffering=0) as file:
            struck.wait(30)
            while part := file.read(1 << 16):
                got.append(part)

    def strike(*_: object) -> None:
        struck.set()
        raise KeyboardInterrupt

    thread = threading.Thread(target=reader)
    thread.start()
    writer = TraceWriter.create(tmp_path, HEADER)
    rows = [Row(i, PARAMETER, "model", f"layers.{i}.self_attn.q_proj.weight") for i in range(20_000)]
    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.table(rows)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.moment(MARK, "after", 0, [Change(0, 20_000, writer.fact_id(HEALTHY))], key=True)
    writer.close()
    thread.join()
    trace = read_rank(b"".join(got).splitlines(keepends=True))
    assert trace.ended == "closed" and len(trace.rows) == 20_000
    assert [moment.label for moment in trace.moments] == ["after"]
    assert trace.facts[trace.state(0).facts[19_999]] == HEALTHY
    assert trace.troubles == ["writer: 1 event(s) before this one could not be written (KeyboardInterrupt)"]


def test_a_forked_child_writes_and_closes_nothing(tmp_path: pathlib.Path) -> None:
    writer = TraceWriter.create(tmp_path, HEADER)
    for name in events(writer):
        if name == "move":
            child = os.fork()
            if child == 0:
                writer.trouble("child", "must not be seen")
                writer.close("child")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    trace = open_trace(tmp_path)[0]
    assert trace.problems == [] and trace.troubles == [] and final(trace) == WHOLE


# ---- where it may not begin

WRONG: list[tuple[str, Callable[[pathlib.Path], object], str]] = [
    ("a file", lambda place: place.write_text("x"), "cannot write a trace: found File exists"),
    (
        "a trace",
        lambda place: TraceWriter.create(place, HEADER).close(),
        "a trace is there already",
    ),
]


@pytest.mark.parametrize(("what", "make", "message"), WRONG, ids=[case[0] for case in WRONG])
def test_what_is_there_already_is_an_error_that_names_the_way_out(
    tmp_path: pathlib.Path, what: str, make: Callable[[pathlib.Path], object], message: str
) -> None:
    place = tmp_path / "there"
    make(place)
    with pytest.raises(TraceError, match=message) as error:
        TraceWriter.create(place, HEADER)
    assert "Name a" in str(error.value)


def test_overwrite_replaces_this_ranks_file_alone(tmp_path: pathlib.Path) -> None:
    for rank in (0, 1):
        TraceWriter.create(tmp_path, Header(run="old", rank=rank, world_size=2)).close()
    TraceWriter.create(tmp_path, Header(run="new", rank=1, world_size=2), overwrite=True).close()
    heads = [json.loads((tmp_path / f"rank-0000{rank}.jsonl").read_text().splitlines()[0]) for rank in (0, 1)]
    assert [head["run"] for head in heads] == ["old", "new"]


# ---- the format


def test_every_event_has_its_number_times_and_phase() -> None:
    told = [json.loads(line) for line in lines()]
    assert [event["seq"] for event in told] == list(range(len(told)))
    assert told[0]["ev"] == "header" and told[0]["schema"] == 1
    clocks = [event["m"] for event in told]
    assert clocks == sorted(clocks)
    assert all(abs(event["t"] - time.time()) < 300 for event in told)
    assert [event["ph"] for event in told if event["ev"] == "moment"] == [0, 1, 1, 1, 2, 2, 2, 2]


def test_a_whole_state_comes_every_64_moments_and_defines_its_facts_again() -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, HEADER)
    story = events(writer)
    for name in story:
        if name == "train: exit":
            break
    keys = []
    for number in range(200):
        from trace_story import changes

        keys.append(writer.wants_key())
        writer.moment("mark", str(number), 1, changes(writer, []), key=keys[-1])
    assert [number for number, key in enumerate(keys) if key] == [61, 125, 189]
    whole = [json.loads(line) for line in sink.lines if b'"key":1' in line]
    assert len(whole) == 4
    assert {json.dumps(event["facts"], sort_keys=True) for event in whole[1:]} == {
        json.dumps({"1": event_facts(HEALTHY), "2": event_facts(STATE)}, sort_keys=True)
    }


def event_facts(facts: Residency) -> dict[str, object]:
    from diagkit.trace.schema import facts_to_json

    return facts_to_json(facts)


def test_a_line_is_with_the_kernel_when_the_call_returns(tmp_path: pathlib.Path) -> None:
    writer = TraceWriter.create(tmp_path, HEADER)
    path = tmp_path / "rank-00000.jsonl"
    seen = 0
    for _ in events(writer):
        written = path.read_bytes()
        assert written.endswith(b"\n") and len(written) > seen
        seen = len(written) if len(written) != seen else seen
    assert isinstance(writer._sink, FileSink) or writer._sink is not None


def test_equal_tables_have_equal_hashes_on_every_rank_and_others_have_not() -> None:
    def hashes(rank: int) -> list[str]:
        return [json.loads(line)["hash"] for line in lines(rank, 2) if b'"ev":"table"' in line]

    assert hashes(0) == hashes(1)
    assert len(set(hashes(0))) == 2
    assert NAMES[0] == "layers.0.weight"
