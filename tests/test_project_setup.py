"""Setting up from nothing: what `make` says when something is missing. Each case really takes the thing away."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def set_up(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ".ci/venv.py", *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_a_python_without_ensurepip_is_told_which_package_brings_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError('taken away')\n")
    result = set_up("--venv", str(tmp_path / "venv"), PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "this Python cannot make environments: ensurepip is missing" in result.stderr
    assert "apt-get install python3-venv" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_what_pip_cannot_find_is_one_line_and_the_next_run_tries_again(tmp_path: pathlib.Path) -> None:
    venv = tmp_path / "venv"
    words = ("--venv", str(venv), "--torch", "0.0.1", "--pip-args=--no-index")
    for _ in range(2):
        result = set_up(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: pip could not install: ERROR: ")
        assert "torch==0.0.1" in result.stderr
        assert str(venv / "setup.log") in result.stderr
    assert "$ " in (venv / "setup.log").read_text()


def test_another_torch_gets_constraints_of_its_own(tmp_path: pathlib.Path) -> None:
    set_up("--venv", str(tmp_path / "venv"), "--torch", "0.0.2", "--pip-args=--no-index", PIP_FIND_LINKS=str(tmp_path))
    lines = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    assert "torch==0.0.2" in lines
    assert not any(line.startswith("torch==2") for line in lines)


def test_an_environment_that_fits_is_used_as_it_is() -> None:
    import torch

    here = pathlib.Path(sys.prefix)
    if not (here / "diagkit-stamp").exists():
        pytest.fail(f"{here} was not made by make: run the tests with make test")
    words = ["make", "--no-print-directory", "setup", f"VENV={here}", f"TORCH={torch.__version__.partition('+')[0]}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_machine_without_python_is_told_so(tmp_path: pathlib.Path) -> None:
    for tool in ("make", "bash", "grep", "sed", "awk"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    result = subprocess.run(
        [str(tmp_path / "make"), "setup"], capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)}
    )
    assert result.returncode == 2
    assert "error: no python3 here. Install Python 3.10 or newer" in result.stderr


def test_missing_system_packages_are_named_to_a_user_who_may_not_install(tmp_path: pathlib.Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    bash = str(shutil.which("bash"))
    needs = [bash, ".ci/system-packages", "make", "compiler"]
    result = subprocess.run(needs, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0
    assert result.stdout.startswith("Not installed: make g++. ")
    assert "sudo apt-get install make g++" in result.stdout
    result = subprocess.run([*needs, "brwser"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 2
    assert "unknown need 'brwser'" in result.stderr


SKIPS = [
    ("pytest.skip('no C++ compiler here')", "true", 1),
    ("pytest.skip('no C++ compiler here')", "", 0),
    ("pytest.skip('accelerator: none here')", "true", 0),
    ("pytest.skip('torch version: silent on 2.8')", "true", 0),
    ("pytest.xfail('known')", "true", 0),
    ("pass", "true", 0),
]


@pytest.mark.parametrize(("body", "ci", "code"), SKIPS)
def test_in_ci_a_skip_is_a_failure_unless_it_is_meant(body: str, ci: str, code: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n\ndef test_it():\n    {body}\n")
    assert run_pytest(tmp_path, ci) == code


@pytest.mark.parametrize(("ci", "code"), [("true", (1, 2)), ("", (0, 5))])
def test_in_ci_a_file_that_skips_itself_is_a_failure(ci: str, code: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\npytest.importorskip('no_such_package')\n")
    assert run_pytest(tmp_path, ci) in code


def run_pytest(folder: pathlib.Path, ci: str) -> int:
    # The rule is conftest.py's; as a plug-in it holds outside of tests/, too.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(words, capture_output=True, timeout=120, cwd=folder, env=environment).returncode
