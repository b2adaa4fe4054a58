"""The figures of a real training step under FSDP2 on two ranks say what the processes measured themselves."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from ranks import run_ranks

from diagkit.trace import Trace, open_trace
from diagkit.views import bytes_by_device, lifeline, rank_grid
from diagkit.views.holdings import PAGEABLE, PINNED, holdings

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def step(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[dict[str, Any]]]:
    """The trace, and what each rank measured."""
    folder = tmp_path_factory.mktemp("step")
    run_ranks(HERE / "full_step_ranks.py", 2, args=[str(folder)], timeout=200)
    return open_trace(folder / "trace"), [json.loads((folder / f"measured-{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_bytes_counted_are_the_bytes_measured(step: tuple[Trace, list[dict[str, Any]]], rank: int) -> None:
    trace, measured = step
    last = holdings(trace[rank])[-1]
    assert last.bytes_of[PINNED, "parameters"] == measured[rank]["parameters"]
    states = sum(count for (_, part), count in last.bytes_of.items() if part == "optimizer state")
    assert states == measured[rank]["states"]
    assert last.unsized == 0
    assert last.total(PAGEABLE) >= states


def test_the_accelerator_holds_gathered_copies_in_the_step_and_nothing_of_them_after(
    step: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace, measured = step
    gathered = [held.bytes_of["npu:0", "gathered copies"] for held in holdings(trace[0])]
    assert max(gathered) >= max(measured[0]["whole"].values()) and gathered[-1] == 0
    figure = bytes_by_device(trace, 0)
    assert "gathered copies" in figure.to_text() and "simulated npu" in figure.to_text()


def test_a_parameter_is_gathered_for_forward_and_backward_and_its_gradient_comes_to_the_cpu(
    step: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace, _ = step
    name = next(row.name for row in trace[0].rows if row.name.endswith("q_proj.weight"))
    figure = lifeline(trace, name, rank=1, moments=20)
    assert figure.title == f"{name} stays on cpu, pinned, through train; gathered on npu:1 twice"
    lines = {line.partition("  ")[0]: line for line in figure.to_text().splitlines()}
    assert re.search(r"\bcpu\b", lines["gradient"]) and "npu" not in lines["gradient"]
    assert set(re.findall(r"npu:\d|cpu", lines["metadata"])) == {"cpu"}
    assert "reduce gradients" in figure.to_text()


def test_the_ranks_of_a_healthy_step_are_alike(step: tuple[Trace, list[dict[str, Any]]]) -> None:
    assert rank_grid(step[0]).title == "All 2 ranks are alike"


def test_a_tied_parameter_is_counted_once(step: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, measured = step
    assert len(measured[0]["tied"]) == 2, "the model has a tie"
    rows = [row.name for row in trace[0].rows if row.kind == "parameter"]
    assert set(measured[0]["tied"]) <= set(rows), "both names are watched"
