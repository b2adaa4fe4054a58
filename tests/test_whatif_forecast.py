"""What-if, on paper and in real lives: the forecast agrees with the published table, and with what ranks really do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from diagkit.demo.expected import FAILURES, expected
from diagkit.demo.experiments import ENGINES, REVISIONS, Experiment
from diagkit.demo.forecast import forecast
from diagkit.demo.launch import Launcher
from diagkit.demo.scenario import Scenario, merged
from diagkit.errors import EngineError, UsageError

FLAGS = {
    "policy": {},
    "both": {"param_offload": True, "optimizer_offload": True},
    "manual": {"offload_policy": False, "param_offload": True, "optimizer_offload": True},
}
MOVES = {"": "", "to": "to the device", "cpu": "to the cpu", "to cpu": "to the device, then to the cpu"}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("engine", "revision"), list(product(ENGINES, REVISIONS)))
def test_the_forecast_of_a_first_operation_is_what_was_measured_on_the_fields_own_engines(
    engine: str, revision: str, flags: str
) -> None:
    for operation, cpu_backend, ranks in product(("save", "load", "export", "train"), (True, False), (1, 2)):
        scenario = Scenario(engine, revision, (operation,), cpu_backend=cpu_backend, **FLAGS[flags])
        row = expected(Experiment(engine, revision, operation, flags, scenario.group("npu")))
        found = forecast(scenario, ranks, "2.13.0")[1]
        fails = row.failure is not None and (ranks > 1 or row.failure != "no-cpu-backend")
        assert row.shows((2, 13), ranks) is fails
        assert found.outcome == ("crash" if fails else "ok"), found
        assert found.moves == MOVES[row.moves]
        if fails:
            assert FAILURES[row.failure or ""] in found.text
        elif row.exported:
            assert found.text == f"works, tensors on the {row.exported}"


def test_one_rank_alone_asks_a_backend_before_torch_2_10() -> None:
    train = Scenario("fsdp", "current", ("train",), cpu_backend=False)
    told = {version: forecast(train, 1, version)[1].outcome for version in ("2.9.1", "2.10.0", "2.13.0")}
    assert told == {"2.9.1": "crash", "2.10.0": "ok", "2.13.0": "ok"}  # as runs on each did


LIVES = [
    Scenario("fsdp", "before", ("train", "save", "to cpu", "save")),
    Scenario("fsdp", "current", ("export", "to device", "export", "to cpu", "export")),
    Scenario("fsdp", "current", ("save", "load", "train", "to device", "train", "to cpu", "train")),
    Scenario("fsdp", "before", ("train", "save", "train"), pin_memory=False),
    Scenario("fsdp", "current", ("train", "export"), cpu_backend=False),
    Scenario("fsdp", "before", ("save", "to device", "train", "export"), offload_policy=False),
    Scenario("fsdp", "current", ("save",), init="meta"),
    Scenario("veomni", "#7103", ("train", "export"), cpu_backend=False),
    Scenario("veomni", "#7005", ("load", "train", "train"), param_offload=True, init="cpu"),
    Scenario("veomni", "current", ("save",), without=("veomni.save-asks-flag",)),
]


@pytest.fixture(scope="module")
def launcher(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("lives"), 2, "sim", timeout=60) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LIVES, ids=lambda scenario: scenario.name)
def test_a_life_goes_as_the_forecast_says_step_by_step(launcher: Launcher, scenario: Scenario) -> None:
    life = launcher.run_life(scenario, f"life-{LIVES.index(scenario)}")
    foretold = forecast(scenario, 2)
    assert [(step.name, step.outcome) for step in life.steps] == [(step.step, step.outcome) for step in foretold]
    for found, wanted in zip(life.steps, foretold, strict=True):
        if found.exported:
            assert wanted.text == f"works, tensors on the {'cpu' if found.exported == 'cpu' else 'device'}"
        if found.outcome == "crash" and wanted.text.startswith("raises '"):
            assert wanted.text.split("'")[1].split(" ...")[0] in found.message
    assert life.simulated and life.device == "npu" and life.ranks == 2


@pytest.mark.slow
def test_a_life_without_failures_is_not_all_there_is_and_the_trace_has_a_phase_a_step(launcher: Launcher) -> None:
    from diagkit.trace import open_trace

    scenario = Scenario("fsdp", "before", ("train", "save", "save"))
    life = launcher.run_life(scenario, "phases")
    assert life.first_failure == "save" and life.step("save 2").outcome == "crash"
    trace = open_trace(life.trace)
    for rank in trace:
        assert [phase.name for phase in rank.phases.values() if phase.name] == ["init", "train", "save", "save 2"]
    assert "DK101" in trace.findings().codes


@pytest.mark.slow
def test_a_stopped_launcher_says_so_and_leaves_no_rank(launcher: Launcher, tmp_path: Path) -> None:
    with Launcher(tmp_path, 2, "sim") as other:
        other.stop()
        with pytest.raises(EngineError, match="warm process ended"):
            other.run_life(Scenario(), "stopped")
    assert launcher.run_life(Scenario(steps=()), "the other goes on").first_failure is None


def test_a_rank_that_never_answered_leaves_nothing_to_be_called_well() -> None:
    scenario = Scenario(steps=("save", "export"))
    fine = {"steps": [{"name": name, "message": "", "exported": ""} for name in scenario.names]}
    assert [step.outcome for step in merged(scenario, [fine, None])] == ["no answer", "not reached", "not reached"]
    failed = {"steps": [{"name": "init", "message": "E: no", "exported": ""}]}
    assert [step.outcome for step in merged(scenario, [failed, None])] == ["crash", "not reached", "not reached"]
    assert [step.outcome for step in merged(scenario, [fine, fine])] == ["ok", "ok", "ok"]


def test_what_no_engine_knows_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"unknown step: found fly\. Choose one of train, save"):
        Scenario(steps=("fly",))
    with pytest.raises(UsageError, match="unknown engine"):
        Scenario("vomni")
    with pytest.raises(UsageError, match="no guard"):
        forecast(Scenario("fsdp", "before", without=("fsdp.save-asks-flag",)))


def test_a_scenario_names_what_is_unusual_about_it() -> None:
    assert Scenario("fsdp", "before", ("save", "save")).name == "fsdp before: save, save"
    odd = Scenario(offload_policy=False, pin_memory=False, init="cpu", cpu_backend=False, steps=())
    assert odd.name == "fsdp current (no offload policy, pin_memory=False, init=cpu, no cpu backend): init"
