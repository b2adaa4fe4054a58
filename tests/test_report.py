"""What a report says: the first failure and not the last, what is missing, whether a fix held, alike in every form."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import jsonschema
import pytest
from traces import SPLIT_MESSAGE, Rank, cause, decoder_names, engine_trace, on, unlike_names

from diagkit.cli import main
from diagkit.errors import UsageError
from diagkit.language import language
from diagkit.trace import Trace
from diagkit.trace.reader import RankTrace, read_rank
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, Change, Failure
from diagkit.views.report import Report, compose, render, write
from diagkit.views.report.data import data, json_text, schema
from diagkit.views.report.markdown import code, markdown, text
from diagkit.views.report.page import page

ROOT = pathlib.Path(__file__).resolve().parent.parent


def story(*steps: Callable[[Rank], None], rank: int = 0, ranks: int = 1, names: list[str] | None = None) -> RankTrace:
    """A rank that is built healthily in init and then lives through these steps."""
    trace = Rank(names or decoder_names(1), rank, ranks)
    trace.writer.moment(ENTER, "init: enter", 1, [], key=True, begins={"name": "init"})
    healthy = [*trace.parameters(on("cpu", True)), *trace.buffer(trace.device), *trace.others()]
    trace.writer.moment(CALL, "fully_shard", 1, healthy)
    trace.writer.moment(EXIT, "init: exit", 1, [])
    for step in steps:
        step(trace)
    return trace.read()


def phase(number: int, name: str) -> Callable[[Rank], None]:
    def step(trace: Rank) -> None:
        trace.writer.moment(ENTER, f"{name}: enter", number, [], begins={"name": name})
        trace.writer.moment(EXIT, f"{name}: exit", number, [])

    return step


def fails(number: int, name: str, error: str, message: str = "boom") -> Callable[[Rank], None]:
    def step(trace: Rank) -> None:
        trace.writer.moment(ENTER, f"{name}: enter", number, [], begins={"name": name})
        failure = Failure(error, message, "Module.state_dict")
        trace.writer.moment(FAILURE, f"Module.state_dict: {error}", number, [], failure=failure, cause=cause("save"))
        trace.writer.moment(EXIT, f"{name}: exit", number, [])

    return step


# ---- what happened


def test_three_sentences_say_who_split_what_what_failed_first_and_what_to_do() -> None:
    split, failed, remedy = compose(engine_trace(ranks=2)).sentences
    assert split == (
        "In save, save_checkpoint (engine.py:41) called Module.to, which split 21 tensors: their metadata says npu:0, "
        "their bytes are in pinned cpu memory."
    )
    assert failed == f"The first failure, on all 2 ranks, was RuntimeError in Module.state_dict: {SPLIT_MESSAGE}"
    assert remedy.startswith("This is DK101, still so when the trace ended. Do not move a module")


def test_of_a_healthy_run_they_say_that_nothing_is_wrong() -> None:
    report = compose(engine_trace(guarded=True))
    assert report.good
    assert report.title == "No residency hazard found"
    assert report.sentences[0].startswith("Through init, train, save, metadata and bytes stayed together")
    assert report.sentences[1:] == ("No operation has failed in this trace.", "There is nothing to mend.")


def test_a_failure_that_no_hazard_explains_is_told_without_one() -> None:
    report = compose(Trace({0: story(fails(2, "eval", "KeyError", "'lr'"))}))
    assert report.title == "KeyError in eval"
    assert report.sentences[1] == "The first failure, on rank 0, was KeyError in Module.state_dict: 'lr'."
    assert report.sentences[2].startswith("No residency hazard explains it")
    assert not report.good


def test_the_first_failure_is_told_and_not_the_last() -> None:
    first, late = fails(2, "save", "RuntimeError", SPLIT_MESSAGE), fails(3, "retry", "AttributeError")
    trace = Trace({0: story(phase(2, "save"), late, rank=0, ranks=2), 1: story(first, late, rank=1, ranks=2)})
    report = compose(trace)
    assert [(told.type, told.phase, told.ranks) for told in report.failures] == [
        ("RuntimeError", "save", (1,)),
        ("AttributeError", "retry", (0, 1)),
    ]
    assert report.told.rank == 1
    assert "RuntimeError" in report.sentences[1]
    shown = render(trace, "html")
    assert shown.index("RuntimeError") < shown.index("AttributeError")


def test_ranks_that_failed_alike_but_for_the_index_of_their_device_are_one_failure() -> None:
    ranks = {n: story(fails(2, "save", "RuntimeError", f"on npu:{n}, index={n}"), rank=n, ranks=3) for n in range(3)}
    (told,) = compose(Trace(ranks)).failures
    assert told.ranks == (0, 1, 2)


@pytest.mark.parametrize("name", ["save", "save {}"])
def test_what_fails_in_step_after_step_is_one_failure(name: str) -> None:
    ranks = {
        0: story(*(fails(n, name.format(n), "RuntimeError") for n in range(2, 7)), ranks=2),
        1: story(*(fails(n, name.format(n), "RuntimeError") for n in range(2, 4)), rank=1, ranks=2),
    }
    trace = Trace(ranks)
    (told,) = compose(trace).failures
    assert (told.phase, told.ranks, told.times) == (name.format(2), (0, 1), 5)
    assert json.loads(render(trace, "json"))["failures"][0]["times"] == 5
    assert "`Module.state_dict` ×5" in render(trace, "md") and "</code> ×5" in render(trace, "html")


def test_a_rank_that_left_without_a_word_and_one_that_left_no_trace_are_told() -> None:
    trace = Rank(decoder_names(1), 1, 3)
    trace.writer.moment(ENTER, "save: enter", 1, trace.parameters(on("cpu", True)), key=True, begins={"name": "save"})
    torn = read_rank(trace.sink.lines)
    report = compose(Trace({0: story(phase(2, "save"), ranks=3), 1: torn}))
    told = {fate.how: fate.ranks for fate in report.fates}
    assert told == {
        "broke off in phase save, after save: enter": (1,),
        "left no trace": (2,),
        "ended as a run should": (0,),
    }
    assert report.title == "2 ranks did not end as they should"
    assert report.sentences[1].startswith("No exception was seen, but on rank 1 the trace broke off in phase save")
    assert report.sentences[2].endswith("look into the job's log on rank 1, where it ends.")
    assert any("no trace of 1 of 3 ranks" in line for line in report.missing)
    assert not report.good


def test_a_hundred_equal_steps_are_one_line_of_the_timeline() -> None:
    for name in ("train", "step {}"):
        steps = [phase(n, name.format(n)) for n in range(2, 102)]
        report = compose(Trace({0: story(*steps, fails(102, "save", "RuntimeError"))}))
        assert [(c.name, c.times, c.outcome) for c in report.chapters] == [
            ("init", 1, "ok"),
            (name.format(2), 100, "ok"),
            ("save", 1, "failed"),
        ]


def test_a_run_without_phases_has_a_timeline_of_its_calls() -> None:
    def steps(trace: Rank) -> None:
        for _ in range(40):
            trace.writer.moment(CALL, "Optimizer.step", 0, [])
        trace.writer.moment(CALL, "Module.state_dict", 0, [])

    outside = compose(Trace({0: story(steps)})).chapters[0]
    assert [(event.kind, event.what, event.times) for event in outside.events] == [
        ("call", "Optimizer.step", 40),
        ("call", "Module.state_dict", 1),
    ]


@pytest.mark.parametrize(("healed", "kind"), [(True, "move"), (False, "split")])
def test_a_split_that_its_phase_mends_is_told_as_a_move(healed: bool, kind: str) -> None:
    def step(trace: Rank) -> None:
        apart = trace.parameters(on(trace.device, True, "cpu"))
        trace.writer.moment(ENTER, "load: enter", 2, [], begins={"name": "load"})
        trace.writer.moment(CALL, "Module.to", 2, apart, cause=cause("load"))
        trace.writer.moment(EXIT, "load: exit", 2, trace.parameters(on("cpu", True)) if healed else [])

    report = compose(Trace({0: story(step)}))
    first = next(event for chapter in report.chapters for event in chapter.events if event.what.endswith("cpu pinned"))
    assert first.kind == kind


def test_a_hazard_that_went_away_before_the_end_is_the_heading_where_nothing_failed() -> None:
    def step(trace: Rank) -> None:
        apart = trace.parameters(on(trace.device, True, "cpu"))
        trace.writer.moment(ENTER, "eval: enter", 2, [], begins={"name": "eval"})
        trace.writer.moment(CALL, "Module.to", 2, apart, cause=cause("eval"))
        trace.writer.moment(EXIT, "eval: exit", 2, [])
        trace.writer.moment(ENTER, "train: enter", 3, trace.parameters(on("cpu", True)), begins={"name": "train"})
        trace.writer.moment(EXIT, "train: exit", 3, [])

    report = compose(Trace({0: story(step)}))
    assert report.title.startswith("DK101, gone by the end: Pinned split") and not report.good


def test_what_only_costs_memory_or_time_does_not_alarm() -> None:
    def unpinned(trace: Rank) -> None:
        slow = trace.writer.fact_id(on("cpu", False, flat_device="cpu", flat_pinned=False))
        trace.writer.moment(CALL, "Module._apply", 0, [Change(0, 1, slow)])

    slow = compose(Trace({0: story(unpinned)}))
    assert slow.findings.codes == ("DK701",)
    assert not slow.good and not slow.alarming
    assert compose(engine_trace(fails=False)).alarming


def test_where_ranks_differ_is_told_by_tensor_and_by_rank() -> None:
    def moves(trace: Rank) -> None:
        trace.writer.moment(CALL, "Module._apply", 0, trace.parameters(on(trace.device)), cause=cause("Module.to"))

    ranks = {n: story(*([moves] if n in (2, 5) else []), rank=n, ranks=8) for n in range(8)}
    found = compose(Trace(ranks)).tensors
    assert {(line.here, line.there, line.ranks) for line in found.differences} == {
        ("cpu/cpu pinned", "npu/npu", (2, 5))
    }
    assert sum(line.count for line in found.differences) == len(decoder_names(1))
    assert (found.compared, found.alike) == (7, 5)


BLOCKED = (
    "a move of FSDPDecoder to npu:0 splits its parameters: metadata npu:0 (DK101): found Module.to over 36 parameters "
    "(at engine.py:12 save). Leave the module where it is."
)


def test_what_a_guard_stopped_is_told_with_the_line_to_delete() -> None:
    report = compose(Trace({0: story(fails(2, "save", "MoveBlocked", BLOCKED))}))
    assert report.sentences[2] == "dk.guard stopped DK101 before it happened: delete the move at engine.py:12 save."
    alone = compose(Trace({0: story(fails(0, "", "MoveBlocked", BLOCKED))}))
    assert alone.fates[0].how == "failed outside any phase: MoveBlocked"


def test_a_chinese_sentence_has_chinese_stops() -> None:
    with language("zh"):
        report = compose(engine_trace(ranks=2))
    assert all(sentence.endswith("。") for sentence in report.sentences[::2]), report.sentences
    for line in report.findings[0].evidence:
        assert not re.search(r"[\u4e00-\u9fff][:.,]", line), line


# ---- did the fix hold

FIXES = [
    ("the same phases without the trouble", {"guarded": True}, "held"),
    ("the trouble again", {}, "not held"),
    ("the split again, which nothing met", {"fails": False}, "not held"),
]


@pytest.mark.parametrize(("options", "verdict"), [case[1:] for case in FIXES], ids=[case[0] for case in FIXES])
def test_whether_a_fix_held(options: dict[str, bool], verdict: str) -> None:
    fix = compose(engine_trace(), engine_trace(**options)).fix
    assert fix is not None
    assert fix.verdict == verdict
    assert {check.outcome for check in fix.checks} == {"gone" if verdict == "held" else "still there"} | (
        {"gone"} if options == {"fails": False} else set()
    )


def test_a_run_that_never_came_so_far_proves_nothing() -> None:
    fix = compose(engine_trace(), Trace({0: story(phase(2, "train"))})).fix
    assert fix is not None
    assert fix.verdict == "cannot be told"
    assert "tensors: 24 in the first run, 15 in the second" in fix.unlike


def test_what_is_new_after_a_fix_is_told_too() -> None:
    fix = compose(engine_trace(), Trace({0: story(phase(2, "save"), fails(3, "load", "ValueError"))})).fix
    assert fix is not None
    assert fix.verdict == "fails"
    assert [check.what for check in fix.checks if check.outcome == "new"] == ["Module.state_dict raises ValueError"]


FAILURES = [
    ("in the same phase", fails(2, "save", "MoveBlocked", "stopped"), "fails"),
    ("where the first had phases and this one has none", fails(0, "", "MoveBlocked", "stopped"), "fails"),
    ("of the same type, with another text", fails(2, "save", "RuntimeError", "disk full"), "fails"),
    (
        "with the same text on another device",
        fails(2, "save", "RuntimeError", SPLIT_MESSAGE.replace("npu:0", "npu:3")),
        "not held",
    ),
    ("with the same text where it has no phases", fails(0, "", "RuntimeError", SPLIT_MESSAGE), "not held"),
]


@pytest.mark.parametrize(("step", "verdict"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
def test_a_second_run_that_fails_is_no_fix(step: Callable[[Rank], None], verdict: str) -> None:
    before = Trace({0: story(fails(2, "save", "RuntimeError", SPLIT_MESSAGE))})
    fix = compose(before, Trace({0: story(step)})).fix
    assert fix is not None
    assert fix.verdict == verdict
    assert ("MoveBlocked" in fix.sentence) == (fix.failure == "Module.state_dict raises MoveBlocked")
    assert (verdict == "fails") == any(check.outcome == "new" for check in fix.checks)


def test_the_failure_of_one_step_is_that_of_any_other_step() -> None:
    steps = [fails(n, f"save {n}", "RuntimeError", SPLIT_MESSAGE) for n in range(2, 9)]
    for before, after in ((steps, steps[5:]), (steps[5:], steps)):
        fix = compose(Trace({0: story(*before)}), Trace({0: story(*after)})).fix
        assert fix is not None and fix.verdict == "not held"


def test_what_was_beside_the_trouble_and_stays_does_not_undo_the_fix() -> None:
    def unpinned(trace: Rank) -> None:
        slow = trace.writer.fact_id(on("cpu", False, flat_device="cpu", flat_pinned=False))
        trace.writer.moment(CALL, "Module._apply", 0, [Change(0, 1, slow)])

    def split(trace: Rank) -> None:
        apart = trace.writer.fact_id(on(trace.device, True, "cpu"))
        change = [Change(1, trace.count - 1, apart)]
        trace.writer.moment(CALL, "Module._apply", 0, change, cause=cause("Module.to"))

    before = story(unpinned, split, fails(2, "save", "RuntimeError", SPLIT_MESSAGE))
    fix = compose(Trace({0: before}), Trace({0: story(unpinned, phase(2, "save"))})).fix
    assert fix is not None
    told = {check.what.partition(" ")[0]: check.outcome for check in fix.checks}
    assert told == {"DK101": "gone", "DK701": "still there", "Module.state_dict": "gone"}
    assert fix.verdict == "held"
    assert fix.sentence.endswith("Beside it 1 thing is still there or new.")


# ---- the forms

TRACES: dict[str, Callable[[], tuple[Trace, Trace | None]]] = {
    "a split": lambda: (engine_trace(ranks=2), None),
    "a fix": lambda: (engine_trace(), engine_trace(guarded=True)),
    "nothing wrong": lambda: (engine_trace(guarded=True), None),
    "an empty trace": lambda: (Trace({0: Rank([], buffers=()).read()}), None),
}


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", TRACES)
def test_the_data_are_as_the_schema_says(name: str, lang: str) -> None:
    trace, against = TRACES[name]()
    found = json.loads(render(trace, "json", lang=lang, against=against))
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert found["language"] == lang


def test_facts_are_the_same_in_every_language() -> None:
    trace = engine_trace(ranks=2)

    def facts(lang: str) -> list[object]:
        with language(lang):
            found = data(compose(trace))
        return [found[key] for key in ("failures", "run", "simulated", "world_size", "ranks", "header", "reproduce")]

    assert facts("en") == facts("zh")


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_every_form_tells_the_same_story(form: str) -> None:
    told = render(engine_trace(ranks=2), form)
    for word in ("DK101", "RuntimeError", "engine.py", "simulated", "CPUOffloadPolicy", "model.to(device)"):
        assert word in told, word
    assert "puts the bytes back into pinned CPU memory" in told, "why it comes to this"


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    'a"onmouseover="alert(1)',
    "</pre></details><b>",
    "a\x1b[31mred\x1b[0m",
    "a\u202egnp.exe",
    "| cell | @somebody #1 ](http://x)",
    "`tick` ``two``",
    "=HYPERLINK(1)",
    "{{ 7 * 7 }}",
]  # fmt: skip


def test_hostile_names_are_text_in_the_page() -> None:
    shown = render(Trace({0: story(fails(2, HOSTILE[0], HOSTILE[1], HOSTILE[3]), names=HOSTILE)}), "html")
    assert "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("<script>") == 1 and "<img" not in shown and "<b>" not in shown
    assert not re.search(r"<[^>]*\sonmouseover", shown)
    assert "7 * 7" in shown


def test_hostile_names_are_text_in_an_issue() -> None:
    told = render(Trace({0: story(fails(2, HOSTILE[6], HOSTILE[1], HOSTILE[6]), names=HOSTILE)}), "md")
    assert "\x1b" not in told and "\u202e" not in told
    prose = re.sub(r"^(`{3,}).*?^\1$", "", told, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", prose)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary|sub)>)|(?<!\\)\]\(|@\w", prose)


def test_code_and_text_survive_what_is_in_them() -> None:
    assert code("a`b") == "``a`b``"
    assert code("`a`") == "`` `a` ``"
    assert code("a|b", table=True) == "`a\\|b`"
    assert text("*a* <b> @me http://x") == "\\*a\\* \\<b\\> &#64;me http&#58;//x"


def test_a_page_may_load_nothing_and_run_nothing_but_its_own_script() -> None:
    shown = render(engine_trace(), "html")
    assert "default-src 'none'" in shown and "script-src 'sha256-" in shown
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|@import", shown)


def test_a_thousand_parameters_on_eight_ranks_stay_below_300_kilobytes() -> None:
    for names in (decoder_names(111), unlike_names(1000, 80)):
        trace, after = (engine_trace(names, ranks=8, guarded=guarded) for guarded in (False, True))
        for form in ("html", "md", "json"):
            assert len(render(trace, form, against=after).encode()) < 300_000, form


def test_a_thousand_ranks_fit_into_two_megabytes() -> None:
    def one(rank: int) -> RankTrace:
        def moves(trace: Rank) -> None:
            change = trace.parameters(on(trace.device))[0]
            row = rank % trace.count
            trace.writer.moment(CALL, "Module._apply", 0, [type(change)(row, 1, change.facts)], cause=cause("to"))

        return story(*([moves] if rank % 4 == 1 else []), rank=rank, ranks=1024, names=decoder_names(10))

    trace = Trace({rank: one(rank) for rank in range(1024)})
    report = compose(trace)
    assert report.tensors.differences and report.tensors.compared == 1023
    for told in (page(report), markdown(report), json_text(report)):
        assert len(told.encode()) < 2_000_000


# ---- the command and the door


def test_the_door_writes_what_the_name_asks_for(tmp_path: pathlib.Path) -> None:
    trace = engine_trace()
    assert trace.report(tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert trace.report(tmp_path / "a.md").read_text().startswith("# DK101")
    assert json.loads(trace.report(tmp_path / "a.json", lang="zh").read_text())["language"] == "zh"


@pytest.mark.parametrize(
    ("name", "said"), [("a.docx", "expected .html, .md, .json"), ("no/a.md", "cannot write the report")]
)
def test_a_file_that_cannot_be_written_is_one_line(name: str, said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        write(engine_trace(), tmp_path / name)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A trace in a folder: a healthy init and a save that fails."""
    trace = Rank(decoder_names(1))
    trace.writer.moment(ENTER, "init: enter", 1, [], key=True, begins={"name": "init"})
    trace.writer.moment(CALL, "fully_shard", 1, [*trace.parameters(on("cpu", True)), *trace.others()])
    trace.writer.moment(EXIT, "init: exit", 1, [])
    fails(2, "save", "RuntimeError")(trace)
    trace.writer.close()
    place = tmp_path / "trace"
    place.mkdir()
    (place / "rank-00000.jsonl").write_bytes(b"".join(trace.sink.lines))
    return place


def test_the_command_says_where_the_report_is(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "a.md"
    assert main(["report", str(folder), "-o", str(out), "--against", str(folder), "--lang", "zh"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text()


def test_a_redacted_report_names_no_folder(folder: pathlib.Path) -> None:
    for form in ("html", "md", "json"):
        assert main(["report", str(folder), "-o", str(folder.parent / f"a.{form}"), "--redact"]) == 0
        told = (folder.parent / f"a.{form}").read_text()
        assert "/site/verl" not in told and "engine.py" in told


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    script = "\n".join([first, code, "from diagkit.cli import main", "sys.exit(main(sys.argv[1:]))"])
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd="/")


def test_a_report_needs_no_torch(folder: pathlib.Path) -> None:
    for form in ("html", "md", "json"):
        done = run("sys.modules['torch'] = None", "report", str(folder), "-o", str(folder.parent / f"a.{form}"))
        assert done.returncode == 0, done.stderr


def test_without_jinja2_the_page_says_what_to_install_and_the_other_forms_work(folder: pathlib.Path) -> None:
    without = "sys.modules['jinja2'] = sys.modules['markupsafe'] = sys.modules['matplotlib'] = None"
    for form in ("md", "json"):
        assert run(without, "report", str(folder), "-o", str(folder.parent / f"a.{form}")).returncode == 0
    done = run(without, "report", str(folder), "-o", str(folder.parent / "a.html"))
    assert done.returncode == 2
    assert done.stderr == "diagkit report: error: the page needs jinja2. pip install 'diagkit[report]'.\n"


def test_a_report_can_be_composed_twice_from_one_trace() -> None:
    trace = engine_trace(ranks=2)
    first, second = compose(trace), compose(trace)
    assert isinstance(first, Report)
    assert data(first) == data(second)
