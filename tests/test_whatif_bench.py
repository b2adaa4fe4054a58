"""The what-if laboratory without a browser: bets, runs in the background, cancelling, and what is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from diagkit.demo.scenario import Life, Scenario, Step
from diagkit.errors import UsageError
from diagkit.views.whatif_bench import NOTHING, Bench, Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(ranks=1, device="sim", out=tmp_path_factory.mktemp("whatif")) as made:
        yield made


def until(condition: object, what: str) -> None:
    assert callable(condition)
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"never: {what}")


def test_what_is_chosen_changes_the_forecast_and_takes_the_bet_back() -> None:
    with Bench(Scenario("fsdp", "before", ("train", "save"))) as bench:
        assert [told.outcome for told in bench.forecast] == ["ok", "ok", "crash"]
        bench.place("save")
        heard: list[str | None] = []
        bench.watch(lambda: heard.append(bench.bet))
        bench.choose(revision="#6604")
        assert [told.outcome for told in bench.forecast] == ["ok", "ok", "ok"]
        assert bench.bet is None and heard == [None]


def test_a_bet_on_a_step_that_is_not_there_and_a_rank_too_many_are_refused() -> None:
    with Bench(Scenario(steps=("save",))) as bench:
        with pytest.raises(UsageError, match="nobody can bet on that: found export, expected one of init, save, noth"):
            bench.place("export")
        with pytest.raises(UsageError, match="found 9, expected 1 to 4"):
            bench.choose(ranks=9)
        with pytest.raises(UsageError, match="nothing has run yet"):
            bench.matrix()


def test_a_run_is_a_real_one_and_is_held_against_forecast_and_bet(bench: Bench) -> None:
    bench.choose(engine="fsdp", revision="before", steps=("train", "save"))
    bench.place(NOTHING)
    run = bench.run()
    assert run.life.first_failure == "save" and "Attempted to set the storage" in run.life.step("save").message
    assert run.won is False and run.surprises == ()
    assert run.verdict == "save fails first, as foretold. Your bet, that nothing fails, is lost."
    matrix = bench.matrix()
    assert run.verdict in matrix.title and "simulated npu" in matrix.to_text()
    assert "splits all 21 parameters" in bench.map().title


def test_runs_gather_in_one_matrix_and_a_change_of_ranks_starts_other_processes(bench: Bench) -> None:
    before = len(bench.runs)
    bench.choose(revision="#6604", steps=("save",), ranks=2)
    bench.place(NOTHING)
    run = bench.run()
    assert run.won and run.life.ranks == 2 and len(bench.runs) == before + 1
    text = bench.matrix().to_text()
    assert f"run {run.number}: #6604" in text and "2 ranks" in text


def test_a_run_in_the_background_shows_its_steps_and_refuses_changes_until_it_is_cancelled(bench: Bench) -> None:
    bench.choose(ranks=1, steps=("train", "save", "export") * 40)
    done = len(bench.runs)
    bench.start()
    try:
        with pytest.raises(UsageError, match=r"cannot change anything while a run is under way\. Wait for it"):
            bench.choose(engine="veomni")
        with pytest.raises(UsageError, match="cannot run while a run is under way"):
            bench.start()
        until(lambda: "train" in bench.progress, "the trace tells of a step")
        assert bench.progress[0] == "init"
    finally:
        bench.cancel()
        bench.wait()
    assert not bench.running and bench.problem == "cancelled" and bench.progress == ()
    assert len(bench.runs) == done
    bench.choose(steps=("save",))
    assert bench.run().life.first_failure is None, "the next run has new processes"


def test_a_cancelled_run_leaves_no_process(bench: Bench) -> None:
    bench.choose(ranks=1, steps=("train",) * 200)
    bench.start()
    until(lambda: bench.progress, "the run began")
    launcher = bench._launcher
    assert launcher is not None
    process = launcher._process
    bench.cancel()
    bench.wait()
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_device_that_is_not_there_is_told_and_the_bench_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Bench(device="cuda", ranks=4) as bench:
        with pytest.raises(UsageError, match=r"the run came to nothing: found .*not enough cuda devices"):
            bench.run()
        assert not bench.running and bench.runs == []


def test_a_verdict_says_what_was_not_foretold() -> None:
    from diagkit.demo.forecast import Forecast

    scenario = Scenario(steps=("save",))
    steps = (Step("init", "ok"), Step("save", "crash", "RuntimeError: no"))
    life = Life(scenario, 1, "npu", True, "2.13.0", steps, "", 0.0)
    told = (Forecast("init", "ok", "works"), Forecast("save", "ok", "works"))
    run = Run(3, life, told, "save")
    assert run.verdict == "save fails first. Not as foretold: save. Your bet, that save fails first, is won."
    assert [cell.unlike for cell in run.outcomes()] == [False, True]
    unknown = Run(4, life, (told[0], Forecast("save", "unknown", "is not known")), None)
    assert unknown.surprises == () and unknown.won is None
