"""The house: which room may import which, what runs inside a training job, and how big a module may grow."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "diagkit").rglob("*.py"))
LONGEST = 400

# Room -> the rooms that it may import. ``errors`` and ``language`` are everyone's; what stands on top may import all.
ARROWS = {
    "errors": set(),
    "language": set(),
    "torch_internals": set(),
    "trace": set(),
    "diagnosis": {"trace"},
    "capture": {"torch_internals", "trace"},
    "live": {"capture", "diagnosis", "torch_internals", "trace"},
    "remedy": {"capture", "diagnosis", "torch_internals", "trace"},
    "lab": {"torch_internals"},
    "demo": {"lab", "capture", "diagnosis", "trace"},
    "views": {"trace", "diagnosis", "demo"},
}
ON_TOP = {"__init__", "__main__", "cli", "auto", "doctor", "run"}
# The notebook's commands act on live models; no other view does.
EXTRA = {"views/magics": {"live", "capture", "remedy", "torch_internals"}}
# `trace.findings()` and `trace.report()` are doors to rooms above: inside a function, opened when called.
DOORS = {
    "trace/merged": {"diagnosis", "views"},
    "trace/rank": {"diagnosis"},
    "trace/table": {"views"},
    "trace/compare": {"views"},
}

# What a training process may import beside the standard library.
IN_A_JOB = {"capture", "trace", "diagnosis", "live", "remedy", "auto", "run", "torch_internals", "errors", "language"}
WITHOUT_TORCH = {"trace", "diagnosis", "errors", "language", "cli"}
# Beside the job: a trace as tables, through pandas and pyarrow, each imported when it is asked for.
TABLES = {"trace/frames", "trace/export"}

# PyTorch's private parts have one door.
PRIVATE_ATTRIBUTES = {
    "_local_tensor",
    "_sharded_param_data",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_get_fsdp_state",
}
PRIVATE_PACKAGES = ("torch.distributed.fsdp._", "torch.distributed.tensor._", "torch.distributed._composable")

# Reads every parameter at every moment: a call through the door for each attribute would cost more than the reading.
HOT = {"capture/residency"}


def name_of(path: pathlib.Path) -> str:
    """``trace/reader`` for ``diagkit/trace/reader.py``, ``trace`` for the room's own ``__init__``."""
    name = path.relative_to(ROOT / "diagkit").with_suffix("").as_posix()
    return name.removesuffix("/__init__")


def room_of(path: pathlib.Path) -> str:
    return name_of(path).partition("/")[0]


class Import(NamedTuple):
    module: str
    line: int
    typing_only: bool
    at_call: bool

    def __repr__(self) -> str:
        return f"line {self.line}: {self.module}"


def imports(path: pathlib.Path) -> Iterator[Import]:
    """Every import, wherever in the file it stands, by its full dotted name."""
    tree = ast.parse(path.read_text())
    package = ["diagkit", *path.relative_to(ROOT / "diagkit").parent.parts]
    typing_only = within(tree, lambda node: isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    at_call = within(tree, lambda node: isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from diagkit import trace` names a room, too.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "diagkit" else [module]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in typing_only, id(node) in at_call)


def within(tree: ast.AST, outer: Callable[[ast.AST], bool]) -> set[int]:
    return {id(inner) for node in ast.walk(tree) if outer(node) for inner in ast.walk(node)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_room_imports_only_the_rooms_that_its_arrows_name(path: pathlib.Path) -> None:
    room = room_of(path)
    if room in ON_TOP or room == "diagkit":
        return
    assert room in ARROWS, f"{room} is no room of the house: add it to ARROWS with its arrows"
    allowed = ARROWS[room] | EXTRA.get(name_of(path), set()) | {room, "errors", "language", "__version__"}
    doors = DOORS.get(name_of(path), set())
    wrong = [
        found
        for found in imports(path)
        if found.module.startswith("diagkit.")
        and found.module.split(".")[1] not in (allowed | doors if found.at_call else allowed)
    ]
    assert not wrong, f"{name_of(path)} may import {sorted(allowed)} and nothing else of diagkit"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_runs_inside_a_training_job_imports_torch_and_the_standard_library_alone(path: pathlib.Path) -> None:
    room = room_of(path)
    if room not in IN_A_JOB | WITHOUT_TORCH or name_of(path) in TABLES:
        return
    allowed = sys.stdlib_module_names | {"diagkit", "__future__"} | (set() if room in WITHOUT_TORCH else {"torch"})
    wrong = [found for found in imports(path) if found.module.split(".")[0] not in allowed and not found.typing_only]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_parts_of_pytorch_have_one_door(path: pathlib.Path) -> None:
    if room_of(path) == "torch_internals" or name_of(path) in HOT:
        return
    tree = ast.parse(path.read_text())
    wrong = [repr(found) for found in imports(path) if found.module.startswith(PRIVATE_PACKAGES)]
    wrong += [
        f"line {node.lineno}: .{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
    ]
    assert not wrong, "go through diagkit.torch_internals"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_holds_one_idea(path: pathlib.Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{name_of(path)} has {lines} lines; {LONGEST} is the most, 100 to 250 reads well"
    assert path.stem not in {"utils", "util", "helpers", "misc", "common"}, "name the idea"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_for(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "its first line tells a reader what is here"
