"""The command line: one line of error that names the way out, and exit codes that scripts can trust."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from diagkit import __version__, cli
from diagkit.errors import UsageError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def diagkit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diagkit", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


MISTAKES = [
    (["docter"], "diagkit: error: unknown command 'docter'; did you mean doctor? Try: diagkit --help"),
    (["doctor", "--jsn"], "diagkit doctor: error: unrecognized arguments: --jsn. Try: diagkit doctor --help"),
    (["doctor", "dem"], "diagkit doctor: error: unknown ability: found 'dem', expected one of "),
    (["--jsn"], "diagkit: error: unrecognized arguments: --jsn. Try: diagkit --help"),
]


@pytest.mark.parametrize(("words", "start"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_two(words: list[str], start: str) -> None:
    result = diagkit(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1


def test_without_a_command_it_shows_what_there_is() -> None:
    result = diagkit()
    assert result.returncode == 0
    assert all(command.name in result.stdout for command in cli.COMMANDS)


def test_it_says_its_version() -> None:
    assert diagkit("--version").stdout.strip() == f"diagkit {__version__}"


def room(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Install one more command whose module has this body for ``main``."""
    (tmp_path / "a_room.py").write_text(f"def add_arguments(parser): pass\n\n\ndef main(args):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_room", raising=False)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("room", "a_room", "try something"),))


ENDINGS = [
    ("return 1", 1, ""),
    ("from diagkit.errors import UsageError; raise UsageError('no ranks')", 2, "diagkit room: error: no ranks\n"),
    ("raise KeyboardInterrupt", 130, "diagkit room: interrupted\n"),
]


@pytest.mark.parametrize(("body", "code", "said"), ENDINGS)
def test_how_a_command_ends_is_its_exit_code(
    body: str,
    code: int,
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room(tmp_path, monkeypatch, body)
    assert cli.main(["room"]) == code
    assert capsys.readouterr().err == said


def test_a_missing_package_is_named_with_the_way_to_get_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room(tmp_path, monkeypatch, "import pandas")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert cli.main(["room"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("diagkit room: error: this command needs pandas: found none in ")
    assert said.endswith("Install it: pip install pandas.\n")


@pytest.mark.parametrize("body", ["import a_module_of_our_own_that_is_gone", "raise ZeroDivisionError"])
def test_a_fault_of_ours_keeps_its_traceback(
    body: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(tmp_path, monkeypatch, body)
    with pytest.raises((ModuleNotFoundError, ZeroDivisionError)):
        cli.main(["room"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m diagkit doctor --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["{", "0"]


def test_an_error_of_the_tree_is_what_a_room_raises() -> None:
    with pytest.raises(UsageError, match="unknown ability"):
        from diagkit import doctor

        doctor.main(cli.argparse.Namespace(need=["x"], json=False))
