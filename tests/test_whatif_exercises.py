"""The exercises of the what-if laboratory: what is judged, and that the run alone decides."""

from __future__ import annotations

from diagkit.demo.exercises import EXERCISES
from diagkit.demo.scenario import Life, Scenario, Step


def life(scenario: Scenario, *outcomes: str) -> Life:
    steps = tuple(Step(name, outcome) for name, outcome in zip(scenario.names, ("ok", *outcomes), strict=True))
    return Life(scenario, 1, "npu", True, "2.13.0", steps, "", 0.0)


def test_an_export_that_crashes_behind_a_guard_solves_the_first_however_it_came_about() -> None:
    exercise = EXERCISES[0]
    assert exercise.judge(life(Scenario("fsdp", "#6463", ("to device", "export")), "ok", "crash"))
    assert exercise.judge(life(Scenario("veomni", "#7103", ("export",), cpu_backend=False), "crash"))
    assert not exercise.judge(life(Scenario("veomni", "#6463", ("export",)), "crash")), "VeOmni has no guard there"
    assert not exercise.judge(life(Scenario("fsdp", "#6463", ("export",), offload_policy=False), "crash"))
    assert not exercise.judge(life(Scenario("fsdp", "#6463", ("export",)), "ok"))
    taken_out = Scenario("fsdp", "current", ("export",), without=("fsdp.export-asks-flag",))
    assert not exercise.judge(life(taken_out, "crash"))


def test_a_price_is_paid_after_a_save_that_worked_not_before() -> None:
    exercise = EXERCISES[1]
    assert exercise.judge(life(Scenario("fsdp", "before", ("save", "train")), "ok", "crash"))
    assert not exercise.judge(life(Scenario("fsdp", "before", ("train", "save")), "crash", "ok"))
    assert not exercise.judge(life(Scenario("fsdp", "before", ("save", "save", "train")), "ok", "crash", "crash"))
    assert not exercise.judge(life(Scenario("fsdp", "before", ("train",)), "crash")), "no save, no solution"


def test_a_save_is_mended_when_the_last_one_works_after_the_first_crashed() -> None:
    exercise = EXERCISES[2]
    steps = ("to device", "save", "to cpu", "save")
    assert exercise.judge(life(Scenario("fsdp", "#6604", steps), "ok", "crash", "ok", "ok"))
    assert not exercise.judge(life(Scenario("fsdp", "#6604", steps), "ok", "crash", "ok", "crash"))
    assert not exercise.judge(life(Scenario("fsdp", "before", ("save", "save")), "crash", "ok"))


def test_the_fourth_wants_the_train_step_to_come_first_and_to_fail_first() -> None:
    exercise = EXERCISES[3]
    assert exercise.judge(life(Scenario("veomni", "current", ("train",), param_offload=True), "crash"))
    assert not exercise.judge(life(Scenario("veomni", "current", ("to device", "train")), "ok", "crash"))
    assert not exercise.judge(life(Scenario("veomni", "current", ("train", "train")), "ok", "crash"))


def test_a_judgement_says_point_by_point_what_is_missing() -> None:
    judgement = EXERCISES[0].judge(life(Scenario("fsdp", "before", ("export",)), "crash"))
    assert str(judgement).splitlines() == [
        "Make the export crash with the guard on.",
        "yes the engine is under CPUOffloadPolicy",
        "NO  the revision guards export, and nothing is taken out of it",
        "yes an export crashes",
        "Not yet.",
    ]
