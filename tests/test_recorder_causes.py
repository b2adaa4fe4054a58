"""Every way to move a model ends in one transition with one cause: the caller's own line, and the calls in between.

One run on two simulated ranks records all scenarios (`recorder_scenarios.py`); the tests read its traces.
"""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

import pytest
from ranks import run_ranks

from diagkit.trace import RankTrace, Trace, Transition, open_trace
from diagkit.trace.schema import ENTER, EXIT, MARK, PARAMETER, Residency

HERE = pathlib.Path(__file__).resolve().parent
PARAMETERS = 21  # of the decoder with its default sizes
LAYER = 9
RESET = "FSDPParam.reset_sharded_param"


class Run(NamedTuple):
    folder: pathlib.Path
    told: list[dict[str, object]]  # by rank

    def trace(self, scenario: str) -> Trace:
        return open_trace(self.folder / scenario)


@pytest.fixture(scope="module")
def run(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("scenarios")
    results = run_ranks(HERE / "recorder_scenarios.py", 2, args=[str(folder)], timeout=240)
    return Run(folder, [json.loads(result.stdout.splitlines()[-1]) for result in results])


def line_of(marker: str) -> tuple[str, int]:
    """File and line that carry ``here: MARKER``."""
    for name in ("recorder_scenarios.py", "recorder_far_away.py"):
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1):
            if line.endswith(f"# here: {marker}"):
                return str(HERE / name), number
    raise AssertionError(f"no line is marked {marker}")


def tensors(trace: RankTrace) -> list[Transition]:
    """Transitions of tensors."""
    return [t for t in trace.transitions() if isinstance(t.after, Residency)]


class Move(NamedTuple):
    scenario: str
    marker: str
    count: int
    before: str
    after: str  # @ stands for the rank
    chain: tuple[str, ...]
    target: str
    phase: str = "save"
    kind: str = PARAMETER


ROOT, SPLIT = "FSDPTinyDecoder", ("cpu/cpu pinned", "npu:@/cpu pinned")
MOVES = [
    Move("direct", "direct", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT),
    Move(
        "far_away", "far_away", PARAMETERS, *SPLIT,
        ("FSDPEngine.save_checkpoint", "load_model_to_device", "_choose", "really_move", "Module.to", RESET), ROOT,
    ),
    Move("outside_any_phase", "outside_any_phase", PARAMETERS, *SPLIT,
         ("main", "outside_any_phase", "Module.to", RESET), ROOT, phase=""),
    Move("sharded_child", "sharded_child", LAYER, *SPLIT, ("Module.to", RESET), "model.layers.0"),
    Move("plain_child", "plain_child", 4, "cpu/cpu pinned", "npu:@/npu:@", ("Module.to",), "model.layers.0.self_attn"),
    Move("wrapper", "wrapper", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT),
    Move("thread", "thread", PARAMETERS, *SPLIT, ("mover", "Module.to", RESET), ROOT),
    Move("stack", "stack", PARAMETERS, *SPLIT, ("deeper", "Module.to", RESET), ROOT),
    Move("npu_method", "npu_method", PARAMETERS, *SPLIT, ("Module.npu", RESET), ROOT, "move"),
    Move("to_empty", "to_empty", PARAMETERS, "cpu/cpu pinned", "cpu/cpu pinned", ("Module.to_empty", RESET), ROOT,
         "move"),
    Move("half", "half", PARAMETERS, "cpu/cpu pinned", "cpu/cpu pinned", ("Module.half", RESET), ROOT, "move"),
    Move("there_and_back", "there_and_back (there)", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT, "move"),
    Move("there_and_back", "there_and_back (back)", PARAMETERS, "npu:@/cpu pinned", "cpu/cpu pinned",
         ("Module.cpu", RESET), ROOT, "move"),
    Move("load_hook", "load_hook", PARAMETERS, *SPLIT, ("move", "Module.to", RESET), ROOT, "load"),
    Move("save_hook", "save_hook", PARAMETERS, *SPLIT, ("move", "Module.to", RESET), ROOT),
    Move("by_buffer", "by_buffer", 1, "npu:@/npu:@", "cpu/cpu", ("Module.to",), "model.rotary_emb", "move", "buffer"),
    Move("two_models", "two_models (ref)", PARAMETERS, *SPLIT, ("Module.to", RESET), "ref"),
    Move("two_models", "two_models (actor)", LAYER, *SPLIT, ("Module.to", RESET), "actor.model.layers.1"),
    Move("at_once_first", "recorders_at_once", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT, "a"),
    Move("at_once_second", "recorders_at_once", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT, "b"),
    Move("at_once_layer", "recorders_at_once", LAYER, *SPLIT,
         ("main", "recorders_at_once", "Module.to", RESET), "FSDPDecoderLayer", ""),
    Move("again", "recorders_at_once (again)", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT, "c"),
    Move("sharded_later", "sharded_later", PARAMETERS, *SPLIT, ("Module.to", RESET), ROOT),
    Move("adapted", "adapted", 1, "cpu/cpu", "npu:@/npu:@", ("Module.to",), "1.lora_A", "adapt"),
]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("move", MOVES, ids=[move.marker + "-" + move.scenario for move in MOVES])
def test_the_move_is_one_transition_with_the_callers_line(run: Run, move: Move, rank: int) -> None:
    trace = run.trace(move.scenario)[rank]
    file, line = line_of(move.marker)
    [found] = [
        t
        for t in tensors(trace)
        if t.cause and t.cause.frame and (t.cause.frame.file, t.cause.frame.line) == (file, line)
        if t.rows[0].kind == move.kind
    ]
    assert len(found.rows) == move.count
    assert isinstance(found.before, Residency) and isinstance(found.after, Residency)
    assert found.before.short() == move.before.replace("@", str(rank))
    assert found.after.short() == move.after.replace("@", str(rank))
    assert found.exchanged
    assert found.cause is not None and found.cause.frame is not None
    assert found.cause.chain == move.chain
    assert found.cause.target == move.target
    assert found.cause.operation == "Module._apply"
    assert f"# here: {move.marker}" in found.cause.frame.code
    assert trace.phases[found.moment.phase].name == move.phase
    # The storage generation went up by one at that moment and not again before the next move.
    before, after = trace.state(found.moment.index - 1), trace.state(found.moment)
    assert {after.generations[row.id] - before.generations[row.id] for row in found.rows} == {1}


@pytest.mark.parametrize("scenario", ["direct", "far_away"])
def test_the_unguarded_save_splits_every_parameter_once_and_nothing_else_moves(run: Run, scenario: str) -> None:
    for trace in run.trace(scenario):
        [split] = tensors(trace)
        assert {row.name for row in split.rows} == {row.name for row in trace.rows if row.kind == PARAMETER}
        assert isinstance(split.after, Residency) and split.after.split and split.after.aliased
        assert {trace.state(-1).generations[row.id] for row in split.rows} == {1}
        assert [moment.label for moment in trace.moments if moment.phase] == ["save: enter", "Module.to", "save: exit"]


def test_the_guarded_save_shows_both_edges_and_not_one_transition(run: Run) -> None:
    for trace in run.trace("guarded"):
        assert tensors(trace) == []
        assert [(moment.kind, moment.label) for moment in trace.moments] == [
            (MARK, "start"),
            (ENTER, "save: enter"),
            (EXIT, "save: exit"),
            (MARK, "end"),
        ]
        for edge in (1, 2):
            state = trace.state(edge)
            names = {row.name for row in trace.rows if row.kind == PARAMETER and state.facts[row.id]}
            assert len(names) == PARAMETERS
            facts = {trace.facts[state.facts[row.id]] for row in trace.rows if row.kind == PARAMETER}
            assert {f.short() for f in facts if isinstance(f, Residency)} == {"cpu/cpu pinned"}


def test_a_child_that_is_no_fsdp_module_is_moved_past_the_reset(run: Run) -> None:
    for trace in run.trace("plain_child"):
        [moved] = tensors(trace)
        assert isinstance(moved.before, Residency) and isinstance(moved.after, Residency)
        assert (moved.before.aliased, moved.after.aliased) == (True, False)
        assert (moved.after.split, moved.after.flat_device, moved.after.flat_pinned) == (False, "cpu", True)
        assert all(row.name.startswith("model.layers.0.self_attn.") for row in moved.rows)


def test_a_notebook_cell_is_named_by_its_own_text(run: Run) -> None:
    for trace in run.trace("cell"):
        [split] = tensors(trace)
        assert split.cause is not None and split.cause.frame is not None
        assert split.cause.chain == ("move", "Module.to", RESET)
        assert split.cause.frame.file == "<ipython-input-7-0123456789ab>"
        assert (split.cause.frame.line, split.cause.frame.code) == (3, 'model.to("npu")')


def test_half_tells_the_types_of_wrapper_and_bytes(run: Run) -> None:
    for trace in run.trace("half"):
        [moved] = [t for t in tensors(trace) if t.rows[0].kind == PARAMETER]
        pairs = [(f.dtype, f.storage_dtype) for f in (moved.before, moved.after) if isinstance(f, Residency)]
        assert pairs == [("float32", "float32"), ("float16", "float16")]


def test_plumbing_of_torch_is_in_no_chain(run: Run) -> None:
    plumbing = ("_apply", "wrapper", "inner", "_fn", "wrap_module_to", "decorate_context", "__exit__", "observed")
    for folder in run.folder.iterdir():
        for trace in open_trace(folder):
            for moment in trace.moments:
                if moment.cause:
                    assert not [name for name in moment.cause.chain if name.rpartition(".")[2] in plumbing], folder.name
                    assert not [frame for frame in moment.cause.stack if "/torch/" in frame.file], folder.name


def test_no_trace_has_a_problem_or_tells_of_trouble(run: Run) -> None:
    folders = list(run.folder.iterdir())
    assert len(folders) > 20
    for folder in folders:
        trace = open_trace(folder)
        assert trace.problems == [], folder.name
        assert len(trace) == 2 and trace.simulated
        assert [t.troubles for t in trace] == [[], []], folder.name


def test_a_call_that_raises_is_told_once_with_its_cause_on_its_way_up(run: Run) -> None:
    message = str(run.told[0]["fails_afterwards"][0])  # type: ignore[index]
    assert message.startswith("Attempted to set the storage of a tensor")
    trace = run.trace("fails_afterwards")[0]
    [failed] = trace.failures
    assert failed.failure is not None and failed.cause is not None and failed.cause.frame is not None
    assert (failed.failure.type, failed.failure.message) == ("RuntimeError", message)
    assert failed.failure.operation == "Module.state_dict"
    assert failed.cause.chain == ("get_model_state_dict", "Module.state_dict")
    assert failed.cause.frame.line == line_of("fails_afterwards")[1]
    assert trace.phases[failed.phase].name == "save"
    assert [m.label for m in trace.moments][-3:] == ["save: exit", "outer: exit", "end"]


def test_the_exception_that_reaches_the_caller_is_the_jobs_own(run: Run) -> None:
    for told in run.told:
        assert told["interrupted"] == "by hand"
        assert told["fails_afterwards"][1] == "fails_afterwards"  # type: ignore[index]
        assert told["retries"] == 3


def test_a_move_that_fails_is_told_with_the_jobs_own_exception(run: Run) -> None:
    for told, trace in zip(run.told, run.trace("cuda"), strict=True):
        [failed] = trace.failures
        assert failed.failure is not None and failed.cause is not None and failed.cause.frame is not None
        assert told["cuda"] == f"{failed.failure.type}: {failed.failure.message}"
        assert (failed.cause.chain, failed.cause.frame.line) == (("Module.cuda",), line_of("cuda")[1])


def test_failures_at_one_address_are_told_each(run: Run) -> None:
    for trace in run.trace("retries"):
        assert [m.failure.type for m in trace.failures if m.failure] == ["RuntimeError"] * 3 + ["ValueError"]
        assert trace.failures[-1].failure is not None and trace.failures[-1].failure.message == "gave up after 3"


def test_an_interrupt_by_hand_is_told_and_goes_on(run: Run) -> None:
    for trace in run.trace("interrupted"):
        [failed] = trace.failures
        assert failed.failure is not None and failed.cause is not None
        assert (failed.failure.type, failed.cause.chain) == ("KeyboardInterrupt", ())
        assert trace.ended == "closed"


def test_a_save_that_goes_on_in_a_thread_is_observed_there(run: Run) -> None:
    for trace in run.trace("saved_in_background"):
        [phase] = [phase for phase in trace.phases.values() if phase.name == "save"]
        assert phase.calls["get_model_state_dict"] == phase.calls["dcp.save"] == phase.calls["Module._apply"] == 1
        labels = [moment.label for moment in trace.moments if moment.phase]
        assert labels.index("dcp.save") < labels.index("Module.to")


def test_two_models_of_one_class_are_told_apart_and_strangers_left_alone(run: Run) -> None:
    for trace in run.trace("two_models"):
        assert {row.model for row in trace.rows} == {"actor", "ref"}
        moved = [{(row.model, row.name.split(".")[1]) for row in t.rows} for t in tensors(trace)]
        assert moved[0] >= {("ref", "layers"), ("ref", "norm")}
        assert moved[1] == {("actor", "layers")}
        assert [m.label for m in trace.moments if m.phase][1:-1] == ["Module.to", "Module.to", "Optimizer.state_dict"]
        assert trace.phases[1].calls["Module._apply"] == 2


def test_a_recorder_of_one_model_hears_nothing_of_another(run: Run) -> None:
    for trace in run.trace("at_once_other"):
        assert [moment.label for moment in trace.moments] == ["start", "end"]


def test_a_model_sharded_while_recorded_keeps_its_rows_and_gets_its_groups(run: Run) -> None:
    for trace in run.trace("sharded_later"):
        names = [row.name for row in trace.rows if row.kind == PARAMETER]
        assert len(names) == len(set(names)) == PARAMETERS
        assert sum(row.kind == "fsdp_group" for row in trace.rows) == 3
        last = trace.state(-1)
        gradients = [row for row in trace.rows if row.kind == "gradient"]
        assert len(gradients) == PARAMETERS
        # The gradients travelled with the move: stranded, and told so although their rows are older than the groups.
        facts = {trace.facts[last.facts[row.id]] for row in gradients}
        assert {f.short() for f in facts if isinstance(f, Residency)} == {f"npu:{trace.rank}/npu:{trace.rank}"}


@pytest.mark.parametrize("way", ["during", "after"])
def test_a_sharded_model_is_gone_when_the_job_lets_go_of_it(run: Run, way: str) -> None:
    for told in run.told:
        gone: dict[str, list[bool]] = told["gone"]  # type: ignore[assignment]
        assert gone["bare"] == [True] * 6  # else this would prove nothing
        assert gone[way] == [True] * 6


def test_rows_of_a_model_that_is_gone_are_gone(run: Run) -> None:
    for trace in run.trace("gone_during"):
        assert set(trace.state(-1).facts) == {0}


def test_what_joins_a_model_gets_rows_and_what_leaves_it_goes(run: Run) -> None:
    for told, trace in zip(run.told, run.trace("adapted"), strict=True):
        assert told["changed"] == {"kept": [4, 4]}  # the removed layer was alive to the end
        last = trace.state(-1)
        there = {row.name for row in trace.rows if last.facts[row.id]}
        assert there == {"0.weight", "0.bias", "0.lora_A.weight", "1.weight", "1.bias", "scale"}
        assert not last.facts[trace.row("1.lora_A.weight").id]
