"""The catalogue: every hazard's text is complete, and the command line teaches it without torch."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from diagkit.cli import main
from diagkit.diagnosis import SEVERITIES, all_rules, find_rules
from diagkit.diagnosis.rule import HEADINGS, rule
from diagkit.diagnosis.signatures import SIGNATURES

CODES = [
    *("DK101", "DK102", "DK103a", "DK103b", "DK104", "DK105"),
    *("DK201", "DK202", "DK203", "DK204", "DK205"),
    *("DK301", "DK302", "DK303"),
    *("DK401", "DK402", "DK403", "DK404"),
    *("DK501", "DK502"),
    *("DK601", "DK602", "DK603", "DK604"),
    *("DK701", "DK702", "DK703"),
    *("DK801", "DK802a", "DK802b", "DK803", "DK901"),
]


def test_every_code_has_a_rule() -> None:
    assert [code for code in CODES if not find_rules(code)] == []


@pytest.mark.parametrize("code", [r.code for r in all_rules()])
def test_a_lesson_says_everything(code: str) -> None:
    (found,) = find_rules(code)
    assert found.title and not found.title.endswith(".")
    assert found.severity in SEVERITIES
    for heading in HEADINGS:
        if heading != "Call":
            assert len(found.text[heading]) > 5, heading
    assert set(found.says) <= set(SIGNATURES)
    assert all(find_rules(other) for other in found.follows)
    assert found.lesson.startswith(f"{code} · {found.title}")
    assert "\n" not in found.text["Remedy"]
    for line in found.text.get("Call", "").split("\n\n"):
        compile(line, "call", "exec")


def test_a_family_code_finds_both_forms() -> None:
    assert [r.code for r in find_rules("dk103")] == ["DK103a", "DK103b"]
    assert [r.code for r in find_rules("DK103b")] == ["DK103b"]
    assert find_rules("DK999") == () and find_rules("") == ()


def test_the_command_lists_teaches_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hazards"]) == 0
    listed = capsys.readouterr().out
    assert all(code in listed for code in CODES)
    assert main(["hazards", "DK604"]) == 0
    lesson = " ".join(capsys.readouterr().out.split())
    assert "no gradient" in lesson and "reset_iter_state" in lesson
    assert main(["hazards", "DK999"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "DK999" in error and "DK101" in error


def test_the_catalogue_is_data_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hazards", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {entry["code"] for entry in data} >= set(CODES)
    assert main(["hazards", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert all(f"## {code}" in page for code in CODES)
    assert page.count("```") % 2 == 0


def test_a_rule_without_a_lesson_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say: How to see it"):

        @rule("DK998", kinds=("parameter",), severity="later")
        def half(it: object) -> bool:
            """A title

            What happens: something.
            """
            return False


def test_diagnosis_needs_no_torch(tmp_path: pathlib.Path) -> None:
    program = """
import sys
class No:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "numpy", "pandas"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, No())
import diagkit.diagnosis, diagkit.diagnosis.predictions, diagkit.diagnosis.logs
from diagkit.cli import main
from diagkit.diagnosis.predictions import Facets, predict
assert predict(Facets(policy="pinned", parameters="split"), "2.13.0")["state_dict"].outcome == "crash"
assert main(["hazards", "DK101"]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=tmp_path)
