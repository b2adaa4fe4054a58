"""What `import diagkit` costs and pulls in, and what works where torch is not installed at all."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import diagkit
from diagkit.cli import COMMANDS

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "pandas", "matplotlib", "IPython", "jinja2", "rich")

# `python -S` sees the standard library and nothing that was ever installed.
BARE = [sys.executable, "-S"]
NO_TORCH = "import sys; sys.modules['torch'] = None\n"
HELP = """
from diagkit.cli import main
try:
    main({})
except SystemExit as leaving:
    assert leaving.code == 0
"""


def run(code: str, *, python: list[str] | None = None, timeout: float = 60) -> str:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    result = subprocess.run(
        [*(python or [sys.executable]), "-c", script], capture_output=True, text=True, timeout=timeout, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_diagkit_pulls_in_nothing_heavy() -> None:
    loaded = json.loads(run("import diagkit, json; print(json.dumps(sorted(sys.modules)))"))
    assert "diagkit" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.alone
def test_import_diagkit_takes_at_most_ten_milliseconds() -> None:
    code = "import time; t = time.perf_counter(); import diagkit; print((time.perf_counter() - t) * 1000)"
    best = min(float(run(code)) for _ in range(5))
    assert best <= 10, f"{best:.1f} ms"


def test_every_public_name_can_be_had_and_is_sorted() -> None:
    pytest.importorskip("torch")
    names = [name for name in diagkit.__all__ if name != "__version__"]
    assert names == sorted(names) == sorted(diagkit._HOMES)
    for name in names:
        value = getattr(diagkit, name)
        assert callable(value), name
        assert name in dir(diagkit)


def test_type_checkers_see_the_same_names_in_the_same_rooms() -> None:
    tree = ast.parse((ROOT / "diagkit" / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == diagkit._HOMES


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'diagkit' has no attribute 'inspekt'"):
        _ = diagkit.inspekt  # type: ignore[attr-defined]


def test_help_needs_nothing_that_is_installed() -> None:
    text = run(HELP.format(["--help"]), python=BARE)
    for command in COMMANDS:
        assert command.name in text
        assert command.help.split(",")[0].split()[0] in text


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_help_of_every_command_works_without_torch(command: str) -> None:
    text = run(NO_TORCH + HELP.format([command, "--help"]))
    assert f"usage: diagkit {command}" in text


@pytest.mark.parametrize("room", ["trace", "errors", "cli", "doctor"])
def test_reading_and_diagnosing_need_nothing_that_is_installed(room: str) -> None:
    run(f"import diagkit.{room}", python=BARE)
