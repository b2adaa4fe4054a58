"""A torch whose private parts have other names: it is said which, nothing raises, and nothing false is found."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from diagkit.diagnosis import diagnose
from diagkit.trace import open_trace

HERE = pathlib.Path(__file__).resolve().parent
# All ranks of all scenarios run within the first test's fixture.
pytestmark = pytest.mark.timeout(900)
#: Names that only one generation of FSDP2 has: hiding what is not there hides nothing.
EITHER = {"FSDPState._fsdp_param_group", "FSDPState._fsdp_param_groups"}


@pytest.fixture(scope="module")
def ran(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hidden")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run([sys.executable, str(HERE / "hidden_ranks.py"), str(folder)], env=env, check=True, timeout=800)
    return folder, json.loads((folder / "results.json").read_text())


def test_what_cannot_be_read_is_named_and_nothing_raises(ran: tuple[pathlib.Path, dict[str, Any]]) -> None:
    _, answers = ran
    assert len(answers) >= 15
    silent = set()
    for name, (answer,) in answers.items():
        assert answer is not None and "error" not in answer, f"{name}: {answer}"
        assert answer["html"]
        part = name.rpartition(".")[2]
        if any(part in problem for problem in answer["problems"]):
            assert f"not readable on this torch: {answer['problems'][0]}" in answer["text"]
        else:
            silent.add(name)
    assert silent < EITHER, silent


def test_nothing_false_is_found_in_what_is_left(ran: tuple[pathlib.Path, dict[str, Any]]) -> None:
    """The model is split: that is found, or nothing is; never another hazard."""
    folder, answers = ran
    for name, (answer,) in answers.items():
        assert set(answer["codes"]) <= {"DK101"}, name
        assert answer["explained"] in ("DK101", None), name
        assert set(diagnose(open_trace(folder / name)).codes) <= {"DK101"}, name
    assert sum(answer["explained"] == "DK101" for (answer,) in answers.values()) >= 8
