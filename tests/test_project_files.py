"""The files around the code agree with each other, and the README promises only what is there."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from packaging.requirements import Requirement

import diagkit
from diagkit.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))
GUIDES = ("README.md", "CONTRIBUTING.md")
TOP_LEVEL = {"notebooks", "diagkit", "data", "tests", "environment.yml"}
USUAL = {"CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"}


def tracked() -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("this is no git checkout, so there is no list of tracked files")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def everything(extra: str) -> list[Requirement]:
    """What an extra installs, the extras inside it included."""
    found = []
    for line in EXTRAS[extra]:
        need = Requirement(line)
        found += [r for inner in need.extras for r in everything(inner)] if need.name == "diagkit" else [need]
    return found


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {plain(need.name): need for need in needs}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_base_package_brings_no_dependency() -> None:
    assert PROJECT["dependencies"] == []
    assert not any(need.name in {"torch", "numpy"} for extra in ("report", "notebook") for need in everything(extra))


def test_every_dependency_has_a_tested_version_that_fits() -> None:
    tested = pins()
    assert str(tested["torch"].specifier) == "==2.13.0"
    for need in everything("dev"):
        if need.marker and not need.marker.evaluate():
            continue
        pin = tested.get(plain(need.name))
        assert pin is not None, f"constraints.txt has no {need.name}"
        (version,) = [spec.version for spec in pin.specifier]
        assert need.specifier.contains(version), f"{need} does not admit the tested {version}"


def test_environment_yml_installs_what_pyproject_says_and_says_who_it_is_for() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert "laptops and class rooms only" in text.splitlines()[0]
    wanted = yaml.safe_load(text)
    plain_needs = [need for need in wanted["dependencies"] if isinstance(need, str)]
    (pip_needs,) = [need["pip"] for need in wanted["dependencies"] if isinstance(need, dict)]
    assert f"python{PROJECT['requires-python']}" in plain_needs
    assert {"pip", "cxx-compiler"} <= set(plain_needs)
    assert pip_needs == ["-c constraints.txt", "-e .[lab]"]
    assert "lab" in EXTRAS


def test_the_default_torch_is_the_tested_one() -> None:
    version = str(pins()["torch"].specifier).removeprefix("==")
    assert f"TORCH ?= {version}\n" in MAKEFILE
    assert f'default="{version}"' in (ROOT / ".ci" / "venv.py").read_text()


def test_every_make_target_is_phony_and_explained() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == TARGETS
    listed = subprocess.run(["make", "-s", "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+) +\S", listed, flags=re.MULTILINE)) == TARGETS


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_names_only_targets_commands_and_files_that_are_there(guide: str) -> None:
    text = (ROOT / guide).read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= TARGETS
    commands = {command.name for command in COMMANDS}
    assert set(re.findall(r"(?<!import )\bdiagkit ([a-z]+)\b", code)) <= commands
    assert set(re.findall(r"\bdk\.([a-z_]+)", code)) <= set(diagkit.__all__)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (ROOT / link).exists(), link
    for path in re.findall(r"`((?:tests|diagkit|notebooks|data|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("guide", GUIDES)
def test_python_in_a_guide_is_python(guide: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(), flags=re.DOTALL):
        ast.parse(block)


def test_a_picture_of_a_simulated_run_says_so() -> None:
    pictures = [path for path in tracked() if path.parent.name == "pictures" and path.suffix == ".svg"]
    assert pictures
    for path in pictures:
        assert "simulated" in path.read_text(), path.name


def test_the_lines_that_a_picture_names_are_those_of_the_code() -> None:
    pictures = (ROOT / "notebooks" / "pictures").glob("*.svg")
    named = {found for path in pictures for found in re.findall(r"\b(moves|checkpoint)\.py:(\d+)", path.read_text())}
    assert {file for file, _ in named} == {"moves", "checkpoint"}
    for file, line in named:
        code = (ROOT / "diagkit" / "lab" / "engines" / f"{file}.py").read_text().splitlines()[int(line) - 1]
        assert {"moves": ".to(device)", "checkpoint": ".state_dict()"}[file] in code, "make pictures"


def test_the_top_level_is_the_agreed_one() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL | USUAL


def test_notebooks_carry_no_outputs() -> None:
    for path in tracked():
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            dirty = [i for i, cell in enumerate(cells) if cell.get("outputs") or cell.get("execution_count")]
            assert not dirty, f"{path.name}, cells {dirty}: run nbstripout"


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    # Spelled in parts, or this very line would be found.
    machine = re.compile(r"(^|[^A-Za-z0-9_.<])/(" + "|".join(["work", "farm", "root", "ho" + "me"]) + r")/")
    found = []
    for path in tracked():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{i}" for i, line in enumerate(lines, 1) if machine.search(line)]
    assert not found


def test_the_licence_is_the_one_that_pyproject_names() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
