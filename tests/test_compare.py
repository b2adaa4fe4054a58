"""Two runs are told apart at the first step where their residencies differ, and nowhere else."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from trace_story import lines
from traces import Rank, cause, decoder_names, engine_trace, on

from diagkit.cli import main
from diagkit.errors import TraceError
from diagkit.trace import RankTrace, Trace, open_trace, read_rank
from diagkit.trace.compare import Comparison, compare
from diagkit.trace.schema import (
    CALL,
    ENTER,
    EXIT,
    GRADIENT,
    MARK,
    OPTIMIZER_STATE,
    PARAMETER,
    Change,
    Failure,
    Header,
    Residency,
    Row,
)
from diagkit.trace.writer import MemorySink, TraceWriter
from diagkit.views.report import compose

HEALTHY, SPLIT = on("cpu", True), on("npu:0", True, "cpu")
Step = tuple[str, int, Residency | None] | tuple[str, int, Residency | None, Failure]


def life(
    *steps: Step,
    names: Sequence[str] = ("a.0.w", "a.1.w"),
    **header: object,
) -> Trace:
    """A run: each step is a call in the phase of that ordinal after which all rows have these facts."""
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="r", device="npu", **header))  # type: ignore[arg-type]
    writer.table([Row(i, PARAMETER, "model", name, shape=(8, 8)) for i, name in enumerate(names)])
    open_phase = 0
    for label, phase, facts, *failure in steps:
        if phase != open_phase:
            if open_phase:
                writer.moment(EXIT, "exit", open_phase, [])
            if phase:
                begins = {"name": {1: "init", 2: "save"}.get(phase, f"phase{phase}")}
                writer.moment(ENTER, "enter", phase, [], begins=begins)
            open_phase = phase
        changes = [] if facts is None else [Change(0, len(names), writer.fact_id(facts))]
        writer.moment(CALL, label, phase, changes, failure=failure[0] if failure else None)
    if open_phase:
        writer.moment(EXIT, "exit", open_phase, [])
    writer.close()
    return Trace({0: read_rank(sink.lines)})


BORN: Step = ("born", 1, HEALTHY)
BAD = Failure("E", "m", "sd")


def test_two_equal_runs_have_no_difference() -> None:
    found = compare(engine_trace(ranks=2), engine_trace(ranks=2))
    assert found.equal and found.partings == ()
    assert repr(found).startswith("no difference: ranks 0, 1 lived alike in both runs")


def test_guarded_and_unguarded_part_at_the_first_move_and_nowhere_else() -> None:
    found = compare(engine_trace(ranks=2), engine_trace(ranks=2, guarded=True))
    [parting] = found.partings
    assert (parting.phase, parting.phase_name, parting.ranks) == (3, "save", (0, 1))
    assert parting.first.startswith("Module._apply (engine.py:41 save_checkpoint: ")
    assert parting.second == "nothing more changed before phase save ended"
    [difference] = parting.differences
    assert (difference.kind, len(difference.names)) == ("parameter", len(decoder_names(2)))
    assert (difference.first, difference.second) == ("npu/cpu pinned", "cpu/cpu pinned")
    assert difference.where[1] == "model.layers.{0,1}.self_attn.{q,k,v,o}_proj.weight ×8"
    assert (found.model, found.setup, found.notes) == ((), (), ())


def test_what_died_at_the_end_of_one_process_alone_is_no_difference() -> None:
    def ended(dies: bool) -> Trace:
        sink = MemorySink()
        writer = TraceWriter(sink, Header(run="r", device="npu"))
        writer.table([Row(0, PARAMETER, "model", "a.w")])
        writer.table([Row(1, OPTIMIZER_STATE, "model", "a.w", "exp_avg", of=0)])
        writer.moment(CALL, "Optimizer.step", 0, [Change(0, 2, writer.fact_id(HEALTHY))], key=True)
        writer.moment(MARK, "end", 0, [Change(1, 1, 0)] if dies else [])
        writer.close()
        return Trace({0: read_rank(sink.lines)})

    assert compare(ended(False), ended(True)).equal
    assert ended(True)[0].living == 0 and ended(False)[0].living == 1
    assert [line.kind for line in compose(ended(True)).tensors.lines] == [PARAMETER, OPTIMIZER_STATE]


def test_the_two_runs_may_change_places() -> None:
    there = compare(engine_trace(), engine_trace(guarded=True)).partings[0]
    back = compare(engine_trace(guarded=True), engine_trace()).partings[0]
    assert (there.first, there.second, there.phase) == (back.second, back.first, back.phase)


CASES: list[tuple[str, list[Step], list[Step], tuple[int, str, str] | None]] = [
    ("a call that changed nothing is no step", [BORN, ("to", 2, None)], [BORN, ("x", 2, None), ("y", 2, None)], None),
    ("the same change by another call", [BORN, ("to", 2, SPLIT)], [BORN, ("cuda", 2, SPLIT)], None),
    ("a change that was undone", [BORN, ("to", 2, SPLIT), ("cpu", 2, HEALTHY)], [BORN, ("x", 2, None)], (2, "to", "")),
    ("a change in another phase", [BORN, ("to", 1, SPLIT), ("x", 2, None)], [BORN, ("to", 2, SPLIT)], (1, "to", "")),
    ("one run goes on", [BORN], [BORN, ("x", 2, None)], (0, "", "")),
    ("another phase", [BORN, ("x", 2, None)], [BORN, ("x", 3, None)], (0, "", "")),
    ("another beginning", [("born", 1, SPLIT)], [BORN], (1, "born", "born")),
    ("a field that is no device", [BORN], [("born", 1, on("cpu", True, requires_grad=True))], (1, "born", "born")),
    ("one failed", [BORN, ("sd", 2, None, BAD)], [BORN, ("sd", 2, None)], (2, "sd raised E: m", "")),
    ("both failed alike, with other words",
     [BORN, ("sd", 2, None, Failure("E", "0x1", "sd"))], [BORN, ("sd", 2, None, Failure("E", "0x2", "sd"))], None),
    ("both failed alike, on other devices, in other folders, with other sizes",
     [BORN, ("sd", 2, None, Failure("E", "npu:0 has no 20.5 GiB for /a/b.pt", "sd"))],
     [BORN, ("sd", 2, None, Failure("E", "npu:1 has no 3 GiB for c/d.pt", "sd"))], None),
    ("they failed of something else",
     [BORN, ("sd", 2, None, Failure("E", "boom", "sd"))], [BORN, ("sd", 2, None, Failure("E", "out of memory", "sd"))],
     (2, "sd raised E: boom", "sd raised E: out of memory")),
    ("they failed otherwise",
     [BORN, ("sd", 2, None, BAD)], [BORN, ("sd", 2, None, Failure("F", "m", "sd"))],
     (2, "sd raised E: m", "sd raised F: m")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "a", "b", "place"), CASES, ids=[case[0] for case in CASES])
def test_they_part_at_the_first_difference(
    name: str, a: list[Step], b: list[Step], place: tuple[int, str, str] | None
) -> None:
    found = compare(life(*a), life(*b))
    if place is None:
        assert found.equal
        return
    [parting] = found.partings
    assert parting.phase == place[0]
    assert parting.first.startswith(place[1] or "nothing more changed before")
    assert parting.second.startswith(place[2] or "nothing more changed before")


def test_fields_that_no_device_shows_are_named() -> None:
    [parting] = compare(life(BORN), life(("born", 1, on("cpu", True, requires_grad=True)))).partings
    [difference] = parting.differences
    assert (difference.first, difference.second) == ("requires_grad=False", "requires_grad=True")


def test_a_rank_on_another_index_or_another_accelerator_is_no_difference() -> None:
    def moved(device: str) -> Step:
        return ("to", 2, on(device, True, "cpu"))

    own = life(BORN, moved("npu:3"), device_index=3)
    assert compare(own, life(BORN, moved("npu:5"), device_index=5)).equal
    wrong = compare(own, life(BORN, moved("npu:2"), device_index=5))
    assert [(d.first, d.second) for d in wrong.partings[0].differences] == [("npu:3/cpu pinned", "npu:2/cpu pinned")]


def test_ranks_that_part_alike_are_told_once_and_others_beside_them() -> None:
    split = engine_trace(ranks=4)
    odd = Trace({**engine_trace(ranks=4, guarded=True).ranks, 2: engine_trace(ranks=4, heals=True).ranks[2]})
    found = compare(split, odd)
    assert [(p.ranks, p.phase) for p in found.partings] == [((0, 1, 3), 3), ((2,), 3)]
    assert "Module.cpu" in found.partings[1].second
    assert repr(found).count("the runs part") == 2


def test_other_models_are_compared_in_what_they_share() -> None:
    found = compare(life(BORN, names=["a.0.w", "a.1.w", "b.w"]), life(BORN, names=["a.0.w", "a.1.w", "c.w"]))
    assert not found.equal and found.partings == ()
    assert found.model == ("only A has 1 row: b.w", "only B has 1 row: c.w")
    assert repr(found).startswith("no difference in what both models have")
    moved = compare(
        life(BORN, ("to", 2, SPLIT), names=["a.0.w", "b.w"]), life(BORN, ("x", 2, None), names=["a.0.w", "c.w"])
    )
    assert moved.partings[0].differences[0].names == ("a.0.w",)


def test_what_belongs_to_a_parameter_of_one_model_alone_is_not_compared() -> None:
    def step(names: Sequence[str]) -> Trace:
        sink = MemorySink()
        writer = TraceWriter(sink, Header(run="r", device="npu"))
        writer.table([Row(i, PARAMETER, "model", name) for i, name in enumerate(names)])
        count = len(names)
        writer.table([Row(count + i, GRADIENT, "model", name, of=i) for i, name in enumerate(names)])
        writer.moment(MARK, "start", 0, [Change(0, count, writer.fact_id(HEALTHY))], key=True)
        writer.moment(CALL, "backward", 0, [Change(count, count, writer.fact_id(HEALTHY))])
        writer.close()
        return Trace({0: read_rank(sink.lines)})

    found = compare(step(["a", "extra"]), step(["a"]))
    assert found.partings == () and found.model == ("only A has 1 row: extra",)


def test_what_cannot_be_compared_is_said() -> None:
    found = compare(engine_trace(ranks=2), engine_trace(ranks=3))
    assert found.equal
    assert found.notes[0] == "only B has rank 2: not compared"
    assert "world sizes differ" in found.notes[1]
    assert found.setup == ("world_size: A 2, B 3",)
    coarse = compare(life(BORN, ("to", 2, SPLIT), detail="phases"), life(BORN, ("to", 2, SPLIT)))
    assert coarse.equal and "details differ" in coarse.notes[0]
    parted = compare(life(BORN, ("x", 2, None), detail="phases"), life(BORN, ("to", 2, SPLIT), ("again", 2, None)))
    assert (parted.partings[0].phase, parted.partings[0].second) == (2, "to")


def test_a_device_of_another_type_makes_no_other_failure() -> None:
    def failing(device: str) -> Trace:
        failure = Failure("E", f"a storage on {device}:0, not on cpu", "sd")
        return Trace({0: replaced(life(BORN, ("sd", 2, None, failure))[0], device=device)})

    assert compare(failing("npu"), failing("cuda")).equal


def replaced(rank: RankTrace, **header: object) -> RankTrace:
    rank.header = replace(rank.header, **header)  # type: ignore[arg-type]
    return rank


def test_ranks_that_failed_of_different_things_are_told_apart() -> None:
    def run(*messages: str) -> Trace:
        lives = [life(BORN, ("sd", 2, None, Failure("E", message, "sd"))) for message in messages]
        return Trace({number: its[0] for number, its in enumerate(lives)})

    found = compare(run("boom", "boom"), run("out of memory", "timeout"))
    assert [(p.ranks, p.second) for p in found.partings] == [
        ((0,), "sd raised E: out of memory"),
        ((1,), "sd raised E: timeout"),
    ]


def test_values_that_only_one_run_recorded_are_no_difference_and_a_note() -> None:
    probed = ("born", 1, on("cpu", True, digest="ab"))
    found = compare(life(probed), life(BORN))
    assert found.equal
    assert found.notes == ("values were recorded of parameters in A, of nothing in B: they are not compared",)
    assert not compare(life(probed), life(("born", 1, on("cpu", True, digest="cd")))).equal
    assert compare(life(probed), life(probed)).notes == ()
    parted = compare(life(probed, ("to", 2, SPLIT)), life(BORN, ("x", 2, None)))
    assert (parted.partings[0].phase, len(parted.notes)) == (2, 1)


def test_runs_without_a_common_rank_are_an_error() -> None:
    alone = Trace({1: engine_trace(ranks=2)[1]})
    with pytest.raises(TraceError, match="no rank in common: found rank 0 and rank 1"):
        compare(Trace({0: engine_trace(ranks=2)[0]}), alone)


def test_a_run_that_was_cut_off_says_so() -> None:
    whole, cut = (Trace({0: read_rank(part)}) for part in (lines(), lines()[:6]))
    [parting] = compare(whole, cut).partings
    assert parting.second == "nothing more changed before the trace was cut off"


def write(folder: pathlib.Path, trace: Sequence[bytes]) -> str:
    folder.mkdir()
    (folder / "rank-00000.jsonl").write_bytes(b"".join(trace))
    return str(folder)


def story(moves: bool) -> list[bytes]:
    told = Rank(["</pre><script>x", "=1+1"], buffers=())
    write_moment = told.writer.moment
    write_moment(MARK, "start", 0, told.parameters(HEALTHY), key=True)
    write_moment(ENTER, "save: enter", 1, [], begins={"name": "save"})
    if moves:
        write_moment(CALL, "Module._apply", 1, told.parameters(SPLIT), cause=cause("Module.to"))
    write_moment(EXIT, "save: exit", 1, [])
    told.writer.close()
    return told.sink.lines


def test_the_command_says_where_and_leaves_with_its_code(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", story(True)), write(tmp_path / "b", story(False))
    assert main(["compare", a, a]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["compare", a, b]) == 1
    assert "the runs part in phase 1 (save)" in capsys.readouterr().out
    assert main(["compare", a, b, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["partings"][0]["differences"][0]["count"] == 2 and data["equal"] is False
    assert main(["compare", a, str(tmp_path / "c")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["compare", a, b, "--lang", "zh"]) == 1
    assert "rank 0：两次运行在第 1 个阶段（save）中分道" in capsys.readouterr().out
    assert main(["compare", a, b, "--redact"]) == 1
    assert str(tmp_path) not in capsys.readouterr().out


def test_it_works_without_anything_that_is_installed(tmp_path: pathlib.Path) -> None:
    a, b = write(tmp_path / "a", story(True)), write(tmp_path / "b", story(False))
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-S", "-m", "diagkit", "compare", a, b], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "Module._apply (engine.py:41" in done.stdout


def test_the_page_form_escapes_names_and_says_the_same(tmp_path: pathlib.Path) -> None:
    a, b = (open_trace(write(tmp_path / name, story(name == "a"))) for name in "ab")
    html = a.compare(b)._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html
    for text in ("phase 1 (save)", "npu/cpu pinned", "cpu/cpu pinned", "simulated"):
        assert text in html
    assert isinstance(a.compare(a), Comparison) and "no difference" in a.compare(a)._repr_html_()
