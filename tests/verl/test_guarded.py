"""verl 0.8.0's own engines under `dk.guard`, in its three modes, and after `dk.heal`: the release in which the FSDP
engine's save and the VeOmni engine's save and export still move what the policy keeps on the CPU."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from realengines import environment
from realengines.cells import Cell
from realengines.launch import Reports, launch

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

RELEASE = "0.8.0"
#: What moves the model there: stopped by a guard that raises, a crash without one.
MOVES = {"fsdp": ("save", "to"), "veomni": ("save", "export", "to")}
OPERATIONS = ("checkpoint", "train", "save", "load", "export", "to")


def cells(operations: tuple[str, ...]) -> list[Cell]:
    return [Cell(RELEASE, engine, "policy", operation, 2) for engine in MOVES for operation in operations]


class Ran:
    """The reports of one guard's mode, and each rank's log."""

    def __init__(self, reports: Reports, out: pathlib.Path) -> None:
        self.reports = reports
        self.out = out

    def ranks(self, engine: str, operation: str) -> list[dict[str, Any]]:
        return self.reports[Cell(RELEASE, engine, "policy", operation, 2)]

    def logs(self, engine: str, operation: str) -> list[str]:
        folder = self.out / Cell(RELEASE, engine, "policy", operation, 2).name
        return [(folder / f"rank-{rank}.log").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """By mode; "" is without a guard, where an engine is mended after its save."""
    environment.build()
    folder = environment.release_folder(RELEASE)
    found = {}
    for mode in ("raise", "skip", "warn", ""):
        out = tmp_path_factory.mktemp(mode or "none")
        chosen = {"warn": ("save",), "": ("train", "heal")}.get(mode, OPERATIONS)
        guard = {"REAL_ENGINES_GUARD": mode} if mode else {}
        found[mode] = Ran(launch(environment.PYTHON, folder, cells(chosen), out, environment=guard), out)
    return found


every_engine = pytest.mark.parametrize("engine", MOVES)


@every_engine
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_guard_that_skips_makes_every_operation_work(engine: str, operation: str, ran: dict[str, Ran]) -> None:
    for report in ran["skip"].ranks(engine, operation):
        assert report["outcome"] == "ok", report.get("exception")
        assert report.get("values_equal", True) and report.get("every_weight_changed", True)
        assert set(report["residency"]["end"]["parameters"]) <= {
            "cpu/cpu pinned",
            "cpu/cpu",
        }  # the latter has no elements
        assert operation == "train" or report["storages_exchanged"].startswith("0/")


@every_engine
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_guard_that_raises_stops_what_moves_and_nothing_else(
    engine: str, operation: str, ran: dict[str, Ran]
) -> None:
    for report in ran["raise"].ranks(engine, operation):
        if operation not in MOVES[engine]:
            assert report["outcome"] == "ok", report.get("exception")
            continue
        assert report["exception"]["type"] == "MoveBlocked"
        message = report["exception"]["message"]
        assert "splits its parameters" in message and "(DK101)" in message
        assert "load_fsdp2_model_to_gpu" in message or "load_veomni_model_to_gpu" in message
        assert set(report["residency"]["failure"]["parameters"]) <= {"cpu/cpu pinned", "cpu/cpu"}


@every_engine
def test_a_guard_that_warns_names_verls_line_and_lets_it_crash(engine: str, ran: dict[str, Ran]) -> None:
    for report, log in zip(ran["warn"].ranks(engine, "save"), ran["warn"].logs(engine, "save"), strict=True):
        assert report["exception"]["message"].startswith("Attempted to set the storage")
        assert log.count("MoveWarning: a move of ") == 1


@every_engine
def test_an_engine_that_was_healed_after_its_save_crashed_trains_as_one_that_never_saved(
    engine: str, ran: dict[str, Ran]
) -> None:
    for healed, other in zip(ran[""].ranks(engine, "heal"), ran[""].ranks(engine, "train"), strict=True):
        assert healed["outcome"] == "ok", healed.get("exception")
        assert healed["crash"].startswith("Attempted to set the storage") and healed["healed"] == ["DK101"]
        assert healed["loss"] == other["loss"] and healed["every_weight_changed"]
