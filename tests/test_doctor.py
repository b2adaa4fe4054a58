"""The doctor: what it finds on machines that lack something, made by really taking the thing away."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from diagkit import doctor

ROOT = pathlib.Path(__file__).resolve().parent.parent


def ask(*words: str, python: tuple[str, ...] = (), **environment: str) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit code, and facts and abilities by name."""
    result = subprocess.run(
        [sys.executable, *python, "-m", "diagkit", "doctor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    told = json.loads(result.stdout)
    return result.returncode, {row["name"]: row for row in [*told["facts"], *told["abilities"]]}


def test_with_everything_installed_everything_works(compiler: str, chromium: str) -> None:
    code, told = ask("demo", "notebooks")
    assert code == 0
    lacking = {name: row for name, row in told.items() if not row.get("works", row.get("ok"))}
    assert not lacking


def test_without_torch_traces_still_work_and_the_rest_says_what_it_needs() -> None:
    # -S hides everything that was installed; the folder that -m adds holds diagkit itself.
    code, told = ask("traces", python=("-S",))
    assert code == 0
    assert told["torch"]["found"] == "not installed"
    assert str(told["torch"]["remedy"]).startswith("pip install 'torch>=2.8'")
    assert told["traces"]["works"] is True
    assert told["record"]["lacks"] == ["torch"]
    code, told = ask("record", python=("-S",))
    assert code == 1


def test_without_a_compiler_only_the_demo_is_lost(tmp_path: pathlib.Path) -> None:
    code, told = ask("demo", PATH=str(tmp_path), CXX="", DIAGKIT_CACHE=str(tmp_path))
    assert code == 1
    assert told["C++ compiler"]["found"] == "no c++, g++ or clang++ on the path"
    assert "apt-get install g++ python3-dev" in str(told["C++ compiler"]["remedy"])
    assert told["demo"]["lacks"] == ["simulator"]
    assert told["simulator"]["remedy"] == "install the compiler and the headers first"
    assert told["record"]["works"] is True


def test_a_cache_that_cannot_be_written_is_told_with_its_name(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, told = ask("demo", DIAGKIT_CACHE=str(blocked / "cache"))
    assert code == 1
    assert str(blocked / "cache") in str(told["simulator"]["found"])
    assert "DIAGKIT_CACHE" in str(told["simulator"]["remedy"])


def test_an_empty_cache_is_no_fault(tmp_path: pathlib.Path, compiler: str) -> None:
    code, told = ask("demo", DIAGKIT_CACHE=str(tmp_path))
    assert code == 0
    assert str(told["simulator"]["found"]).startswith("not compiled yet")


def test_a_compiler_that_does_not_compile_is_found_out() -> None:
    false = shutil.which("false")
    if false is None:
        pytest.skip("no program that always fails")
    _, told = ask(CXX=false)
    assert told["C++ compiler"]["ok"] is False
    assert told["C++ compiler"]["found"] == f"{false}: does not compile"


def test_the_text_names_every_fact_and_a_remedy_for_each_that_is_missing() -> None:
    found = [doctor.Fact("torch", False, "not installed", "install it"), doctor.Fact("Python", True, "3.11")]
    can = doctor.abilities(found)
    text = "\n".join(doctor._as_text(found, can))
    assert "  --  torch   not installed" in text
    assert "  ok  Python  3.11" in text
    assert "  no  record         record, guard and heal a model of your own  (needs: torch)" in text
    assert text.endswith("What to do for the rest\n  torch: install it")


def test_every_ability_needs_only_facts_that_are_looked_up() -> None:
    names = {fact.name for fact in doctor.facts()}
    for ability, _, needs in doctor._ABILITIES:
        assert set(needs) <= names, ability
