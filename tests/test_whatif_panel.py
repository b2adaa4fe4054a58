"""The laboratory's widgets without a browser: controls and bench say the same, and a page without a kernel shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from diagkit.demo.scenario import Scenario
from diagkit.views import whatif
from diagkit.views.whatif_panel import WhatIf


@pytest.fixture
def laboratory() -> Iterator[WhatIf]:
    made = whatif(Scenario("fsdp", "before", ("train", "save")), ranks=1, device="sim")
    yield made
    made.close()


def test_a_control_changes_the_scenario_and_the_scenario_the_controls(laboratory: WhatIf) -> None:
    laboratory._choices["engine"].value = "veomni"
    laboratory._choices["pin_memory"].value = False
    laboratory._choices["ranks"].value = 2
    laboratory._steps.value = ["export", "export"]
    assert laboratory.bench.scenario == Scenario("veomni", "before", ("export", "export"), pin_memory=False)
    assert laboratory.bench.ranks == 2
    laboratory.bench.choose(revision="current", cpu_backend=False)
    assert laboratory._choices["revision"].value == "current"
    assert laboratory._choices["cpu_backend"].value is False


def test_only_steps_that_are_chosen_can_be_bet_on(laboratory: WhatIf) -> None:
    laboratory._bet.value = "save"
    assert laboratory.bench.bet == "save"
    laboratory._steps.value = ["export"]
    assert laboratory.bench.bet is None and laboratory._bet.value == ""
    assert [value for _, value in laboratory._bet.options] == ["", "nothing", "init", "export"]


def test_the_page_for_readers_without_a_kernel_shows_the_forecast_and_loads_nothing(laboratory: WhatIf) -> None:
    page = laboratory.to_html(whole_page=True)
    assert "Attempted to set the storage" in page and "moves the model to the device" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", page)


def test_a_guard_that_the_revision_lacks_is_told_in_the_place_of_the_forecast_and_runs_nothing() -> None:
    made = whatif(Scenario("fsdp", "before", without=("fsdp.save-asks-flag",)), device="sim")
    assert "revision before has no guard fsdp.save-asks-flag" in made.to_html()
    made._run.click()
    assert "revision before has no guard" in made._state.value and not made.bench.running
    made.close()


@pytest.mark.slow
def test_what_the_bench_runs_is_shown_beside_the_forecast(laboratory: WhatIf, compiler: str) -> None:
    run = laboratory.bench.run()
    assert run.verdict in laboratory._state.value
    page = laboratory.to_html()
    assert "RuntimeError: Attempted to set the storage" in page and page.count("<svg") == 2
    assert "simulated npu" in page
    assert laboratory._run.disabled is False and laboratory._cancel.disabled is True
    laboratory.bench.choose(steps=("save",))
    assert "RuntimeError" not in laboratory._told.value, "what was found belongs to what was run"
