"""The rules on written traces: at rest or not, with which cause, over many ranks; and how a diagnosis is told."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import pytest
from traces import engine_trace

from diagkit.cli import main
from diagkit.diagnosis import diagnose
from diagkit.diagnosis.finding import Findings, ranks_text
from diagkit.trace import RankTrace, Trace, read_rank
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
    OPTIMIZER,
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
    OptimizerFacts,
    Residency,
    Row,
)  # fmt: skip
from diagkit.trace.values import printable
from diagkit.trace.writer import MemorySink, TraceWriter

HEALTHY = Residency(
    "cpu",
    "cpu",
    pinned=True,
    wrapper="DTensor",
    mesh_device="npu",
    flat_device="cpu",
    flat_pinned=True,
    aliased=True,
    registered=True,
    sharded_state="sharded",
)
SPLIT = Residency(
    "npu:0",
    "cpu",
    pinned=True,
    wrapper="DTensor",
    mesh_device="npu",
    flat_device="cpu",
    flat_pinned=True,
    aliased=True,
    registered=True,
    sharded_state="sharded",
)


def parameter(metadata: str, storage: str | None, **more: object) -> Residency:
    facts: dict[str, object] = {"wrapper": "DTensor", "mesh_device": "npu", "flat_device": "cpu", "aliased": True,
                                "registered": True, "sharded_state": "sharded", "pinned": storage == "cpu"}  # fmt: skip
    return Residency(metadata, storage, **{**facts, **more})  # type: ignore[arg-type]


def group(**more: object) -> GroupFacts:
    facts: dict[str, object] = {"offload": True, "pin_memory": True, "policy": "CPUOffloadPolicy", "mesh_device": "npu",
                                "mesh_size": 2, "backends": "cpu:gloo,npu:hccl", "lazy_init": "done"}  # fmt: skip
    return GroupFacts(**{**facts, **more})  # type: ignore[arg-type]


def look(rows: Sequence[tuple[str, Facts]], **header: object) -> RankTrace:
    """One live look: (kind, facts) per row; gradients, state and exports belong to the first parameter."""
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="look", device="npu", torch="2.13.0", **header))  # type: ignore[arg-type]
    changes = []
    for number, (kind, facts) in enumerate(rows):
        owner = 0 if kind in (GRADIENT, OPTIMIZER_STATE) else None
        part = "exp_avg" if kind == OPTIMIZER_STATE else ""
        writer.table([Row(number, kind, "model", "" if kind == GROUP else f"w{number}", part, of=owner)])
        changes.append(Change(number, 1, writer.fact_id(facts)))
    writer.moment(MARK, "look", 0, changes, key=True)
    writer.close()
    return read_rank(sink.lines)


ACCELERATOR = parameter("npu:0", "npu:0", pinned=None, flat_device="npu:0")
PLAIN = group(offload=False, pin_memory=False, policy="OffloadPolicy")

CASES: list[tuple[str, list[tuple[str, Facts]], tuple[str, ...]]] = [
    ("healthy", [(PARAMETER, HEALTHY), (GROUP, group())], ()),
    ("pinned split", [(PARAMETER, SPLIT), (GROUP, group())], ("DK101",)),
    (
        "split of an empty shard",
        [(PARAMETER, parameter("npu:0", "cpu", empty=True, pinned=False, aliased=False)), (GROUP, group())],
        ("DK101",),
    ),
    (
        "inverse split",
        [(PARAMETER, parameter("cpu", "npu:0", pinned=None, aliased=False)), (GROUP, group())],
        ("DK102",),
    ),
    (
        "split with broken handles",
        [(PARAMETER, parameter("npu:0", "cpu", aliased=False)), (GROUP, group())],
        ("DK102",),
    ),
    ("split without the policy", [(PARAMETER, parameter("npu:0", "cpu", pinned=False)), (GROUP, PLAIN)], ("DK102",)),
    ("wholly moved", [(PARAMETER, ACCELERATOR), (GROUP, group(pin_memory=False))], ("DK103a",)),
    (
        "moved past the reset",
        [(PARAMETER, parameter("npu:0", "npu:0", pinned=None, aliased=False)), (GROUP, group())],
        ("DK103b",),
    ),
    (
        "a policy with flags per phase",
        [(PARAMETER, ACCELERATOR), (GROUP, group(policy_flags="offload_backward=False"))],
        (),
    ),
    (
        "gathered for the moment",
        [(PARAMETER, parameter("npu:0", "npu:0", sharded_state="unsharded")), (GROUP, group())],
        (),
    ),
    ("on the accelerator without the policy", [(PARAMETER, ACCELERATOR), (GROUP, PLAIN)], ()),
    ("parked on the CPU without the policy", [(PARAMETER, parameter("cpu", "cpu", pinned=False)), (GROUP, PLAIN)], ()),
    (
        "on meta",
        [(PARAMETER, parameter("meta", "meta")), (BUFFER, Residency("meta", "meta")), (GROUP, group())],
        ("DK104",),
    ),
    ("gradient beside its parameter", [(PARAMETER, HEALTHY), (GRADIENT, HEALTHY), (GROUP, group())], ()),
    ("stranded gradient", [(PARAMETER, HEALTHY), (GRADIENT, ACCELERATOR), (GROUP, group())], ("DK301",)),
    ("stranded moments", [(PARAMETER, HEALTHY), (OPTIMIZER_STATE, ACCELERATOR), (GROUP, group())], ("DK302",)),
    ("moments parked without the policy", [(PARAMETER, ACCELERATOR), (OPTIMIZER_STATE, HEALTHY), (GROUP, PLAIN)], ()),
    ("buffers that rest on the CPU", [(PARAMETER, HEALTHY), (BUFFER, Residency("cpu", "cpu")), (GROUP, group())], ()),
    ("poisoned lazy init", [(GROUP, group(lazy_init="unfinished"))], ("DK601",)),
    ("aborted backward", [(GROUP, group(backward_pending=True))], ("DK604",)),
    (
        "backward under way",
        [(GROUP, group(backward_pending=True, training_state="post_backward", backward_running=True))],
        (),
    ),
    ("two owners", [(GROUP, group()), (ENGINE, EngineFacts("E", "True", True, "True", "False"))], ("DK603",)),
    ("manual offload alone", [(GROUP, PLAIN), (ENGINE, EngineFacts("E", "False", True, "True", "True"))], ()),
    ("flag missing", [(GROUP, group()), (ENGINE, EngineFacts("E", "missing", True))], ("DK901",)),
    ("flag false", [(GROUP, group()), (ENGINE, EngineFacts("E", "False", True))], ("DK901",)),
    ("an engine without such a flag", [(GROUP, group()), (ENGINE, EngineFacts("E", "missing", False))], ()),
    (
        "unreadable",
        [(PARAMETER, Residency("npu:0", unreadable="no")), (OPTIMIZER_STATE, ACCELERATOR), (GROUP, group())],
        (),
    ),
]


@pytest.mark.parametrize(("name", "rows", "codes"), CASES, ids=[case[0] for case in CASES])
def test_a_state_gets_its_code(name: str, rows: list[tuple[str, Facts]], codes: tuple[str, ...]) -> None:
    assert diagnose(look(rows)).codes == codes


AWAY = Residency("npu:0", "npu:0")
STEPS: list[tuple[str, Residency, Residency, tuple[str, ...]]] = [
    ("beside its parameter", HEALTHY, Residency("cpu", "cpu"), ()),
    ("away from its parameter", HEALTHY, AWAY, ("DK302",)),
    ("gone with its parameter", ACCELERATOR, AWAY, ("DK103a",)),
]


def options(name: str) -> OptimizerFacts:
    return OptimizerFacts("AdamW", fused=name == "fused", capturable=name == "capturable")


@pytest.mark.parametrize(("name", "owner", "step", "codes"), STEPS, ids=[case[0] for case in STEPS])
@pytest.mark.parametrize("option", ["", "fused", "capturable"])
@pytest.mark.parametrize("other", ["", "fused", "capturable"])
def test_a_step_counter_belongs_on_the_cpu_under_the_policy_whatever_any_optimizer_is(
    name: str, owner: Residency, step: Residency, codes: tuple[str, ...], option: str, other: str
) -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, Header(device="npu"))
    facts: list[tuple[Row, Facts]] = [
        (Row(0, PARAMETER, "model", "w"), owner),
        (Row(1, OPTIMIZER_STATE, "model", "w", "step", of=0), step),
        (Row(2, GROUP, "model", ""), group()),
        (Row(3, OPTIMIZER, "model", "AdamW"), options(option)),
        (Row(4, OPTIMIZER, "model", "AdamW", "2"), options(other)),
    ]
    for row, _ in facts:
        writer.table([row])
    writer.moment(MARK, "look", 0, [Change(row.id, 1, writer.fact_id(f)) for row, f in facts], key=True)
    writer.close()
    assert diagnose(read_rank(sink.lines)).codes == codes


def test_a_group_is_that_of_the_nearest_module() -> None:
    """A layer with a policy of its own inside a root without one."""
    sink = MemorySink()
    writer = TraceWriter(sink, Header(device="npu"))
    writer.table([Row(0, PARAMETER, "model", "layers.0.mlp.w"), Row(1, PARAMETER, "model", "layers.10.w")])
    writer.table([Row(2, GROUP, "model", ""), Row(3, GROUP, "model", "layers.0"), Row(4, GROUP, "model", "layers.1")])
    facts: list[Facts] = [ACCELERATOR, ACCELERATOR, PLAIN, group(pin_memory=False), group(pin_memory=False)]
    writer.moment(MARK, "look", 0, [Change(i, 1, writer.fact_id(f)) for i, f in enumerate(facts)], key=True)
    writer.close()
    (finding,) = diagnose(read_rank(sink.lines))
    assert finding.names == ("layers.0.mlp.w",)


# ---- at rest


def story(*moments: tuple[str, int, str, Residency | None], failure: str = "", ended: bool = True) -> RankTrace:
    """(kind, phase, name of the phase that begins, what the one parameter is from now on)."""
    sink = MemorySink()
    writer = TraceWriter(sink, Header(device="npu", torch="2.13.0"))
    writer.table([Row(0, PARAMETER, "model", "w")])
    writer.table([Row(1, GROUP, "model", "")])
    for number, (kind, phase, name, facts) in enumerate(moments):
        changes = [Change(0, 1, writer.fact_id(facts))] if facts else []
        if number == 0:
            changes.append(Change(1, 1, writer.fact_id(group())))
        frame = Frame("/job/train.py", 10 + number, "move")
        cause = Cause("Module._apply", ("move", "Module.to"), frame) if facts and number else None
        told = Failure("RuntimeError", failure, "op") if kind == FAILURE else None
        begins = {"name": name} if kind == ENTER else None
        writer.moment(kind, name, phase, changes, key=number == 0, cause=cause, begins=begins, failure=told)
    if ended:
        writer.close()
    return read_rank(sink.lines)


TEXT = "Attempted to set the storage of a tensor on device cpu to a storage on different device npu:0"


def test_a_split_for_a_moment_is_no_fault() -> None:
    for name in ("init", "load", "mine"):
        calm = story((ENTER, 1, name, HEALTHY), (CALL, 1, "", SPLIT), (CALL, 1, "", HEALTHY), (EXIT, 1, "", None))
        assert not diagnose(calm)


def test_a_phase_that_ends_split_is_a_fault() -> None:
    (finding,) = diagnose(story((ENTER, 1, "move", HEALTHY), (CALL, 1, "", SPLIT), (EXIT, 1, "", None)))
    assert (finding.code, finding.phase, finding.severity) == ("DK101", "move", "later")
    assert finding.cause is not None and finding.cause.frame is not None and finding.cause.frame.line == 11
    assert "still so when phase move ended" in finding.evidence


def test_an_operation_that_begins_on_a_split_is_a_fault_unless_it_builds_the_model() -> None:
    assert diagnose(story((MARK, 0, "", HEALTHY), (CALL, 0, "", SPLIT), (ENTER, 1, "save", None), ended=False)).codes
    for name in ("init", "load"):
        begun = story((MARK, 0, "", SPLIT), (ENTER, 1, name, None), (CALL, 1, "", HEALTHY), (EXIT, 1, "", None))
        assert not diagnose(begun)


def test_a_model_on_meta_is_a_fault_when_it_is_used_not_when_it_is_being_built() -> None:
    meta = parameter("meta", "meta")
    assert not diagnose(story((ENTER, 1, "materialise", meta), (CALL, 1, "", HEALTHY), (EXIT, 1, "", None)))
    assert diagnose(story((ENTER, 1, "materialise", meta), (EXIT, 1, "", None))).codes == ("DK104",)
    assert diagnose(story((ENTER, 1, "train", meta), (CALL, 1, "", HEALTHY), (EXIT, 1, "", None))).codes == ("DK104",)


def test_a_failure_makes_the_split_a_fault_only_if_it_speaks_of_it() -> None:
    def failing(text: str) -> RankTrace:
        return story(
            (ENTER, 1, "init", HEALTHY), (CALL, 1, "", SPLIT), (FAILURE, 1, "", None), (CALL, 1, "", HEALTHY),
            (EXIT, 1, "", None), failure=text,
        )  # fmt: skip

    (finding,) = diagnose(failing(TEXT))
    assert finding.code == "DK101" and finding.severity == "now" and not finding.lasting
    assert finding.failure.startswith("RuntimeError: Attempted")
    assert not diagnose(failing("the file is corrupt"))


def test_a_rank_that_was_killed_inside_a_phase_is_not_judged_there() -> None:
    killed = story((ENTER, 1, "init", HEALTHY), (CALL, 1, "", SPLIT), ended=False)
    assert not diagnose(killed)
    outside = story((MARK, 0, "", HEALTHY), (CALL, 0, "", SPLIT), ended=False)
    assert diagnose(outside).codes == ("DK101",)


def test_a_split_that_stays_is_told_once() -> None:
    trace = story(
        (ENTER, 1, "move", HEALTHY), (CALL, 1, "", SPLIT), (EXIT, 1, "", None), (ENTER, 2, "eval", None),
        (EXIT, 2, "", None), (ENTER, 3, "save", None), (FAILURE, 3, "", None), (EXIT, 3, "", None), failure=TEXT,
    )  # fmt: skip
    (finding,) = diagnose(trace)
    assert (finding.phase, finding.severity, finding.lasting) == ("move", "now", True)


# ---- many ranks, and words


def test_ranks_with_one_cause_make_one_finding() -> None:
    findings = diagnose(engine_trace(ranks=8))
    (finding,) = findings
    assert finding.ranks == tuple(range(8)) and len(finding.names) == 21
    assert "all 8" in repr(findings)
    some = Trace({rank: engine_trace(ranks=8, guarded=rank not in (2, 3, 5))[rank] for rank in range(8)})
    finding, apart = diagnose(some)
    assert finding.ranks == apart.ranks == (2, 3, 5) and apart.code == "DK801"
    assert "2, 3, 5 of 8" in str(finding)


def test_a_guarded_engine_and_one_that_mends_itself_are_silent() -> None:
    assert not diagnose(engine_trace(guarded=True, ranks=2))
    assert not diagnose(engine_trace(heals=True, fails=False))
    assert repr(diagnose(engine_trace(guarded=True))).startswith("no residency hazard found (simulated")


def test_consequences_come_from_the_measured_tables() -> None:
    (finding,) = diagnose(engine_trace())
    told = {c.operation: c for c in finding.consequences}
    assert told["state_dict"].outcome == "crash" and "2.13.0" in told["state_dict"].source


def test_the_representations_are_short_and_escaped() -> None:
    findings = diagnose(
        engine_trace(names=[f"model.layers.{i}.mlp.w" for i in range(3000)] + ["<b>x</b>\x1b[31m\u202e"])
    )
    assert len(repr(findings)) < 4000
    page = findings._repr_html_()
    assert len(page) < 8000 and "<b>x" not in page and "\x1b" not in page
    assert "\x1b" not in repr(findings) and "\u202e" not in repr(findings)
    assert printable("a\x1bb") == "a\\x1bb"


def test_what_a_remedy_has_in_backticks_is_code_on_a_page() -> None:
    findings = diagnose(engine_trace())
    assert any("`" in finding.remedy for finding in findings)
    page = findings._repr_html_()
    assert "`" not in page and "<code>" in page


@pytest.mark.parametrize(
    ("ranks", "world", "text"),
    [((0,), 1, "0"), ((0, 1), 2, "all 2"), ((0, 1, 2, 5), 8, "0..2, 5 of 8"), ((3, 4), 8, "3, 4 of 8")],
)
def test_ranks_in_words(ranks: tuple[int, ...], world: int, text: str) -> None:
    assert ranks_text(ranks, world) == text


def test_severities_are_ordered() -> None:
    findings = diagnose(engine_trace(fails=False))
    assert findings.worst == "later"
    assert findings.at_least("later") and not findings.at_least("now")
    assert Findings().worst is None


def test_diagnose_leaves_with_one_where_it_must(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "split", SPLIT)
    _write(tmp_path / "calm", HEALTHY)
    assert main(["diagnose", str(tmp_path / "split")]) == 1
    assert "DK101" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "split"), "--fail-on", "now"]) == 0
    assert main(["diagnose", str(tmp_path / "split"), "--fail-on", "never"]) == 0
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "split"), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["code"] == "DK101" and data["findings"][0]["remedy"]
    assert main(["diagnose", str(tmp_path / "calm")]) == 0
    assert main(["diagnose", str(tmp_path / "nothing")]) == 2


def _write(folder: pathlib.Path, facts: Residency) -> None:
    writer = TraceWriter.create(folder, Header(device="npu", torch="2.13.0"))
    writer.table([Row(0, PARAMETER, "model", "w")])
    writer.table([Row(1, GROUP, "model", "")])
    writer.moment(ENTER, "move", 1, [], key=True, begins={"name": "move"})
    writer.moment(EXIT, "move", 1, [Change(0, 1, writer.fact_id(facts)), Change(1, 1, writer.fact_id(group()))])
    writer.close()
