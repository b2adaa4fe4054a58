"""``diagkit doctor``: what this machine has, what of diagkit will work on it, and what to do for the rest.

Everything is found out by trying it, and without torch too. A *fact* is one thing that is there or not; an *ability* is
something that diagkit can do, and works when all the facts that it needs are there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from diagkit import __version__
from diagkit.errors import DiagkitError, MissingDependency, UsageError
from diagkit.lab.simdevice import build

__all__ = ["Ability", "Fact", "abilities", "add_arguments", "facts", "main"]

# Capture reads torch's FSDP2 from here on; the simulated accelerator has a floor of its own.
CAPTURE_FLOOR = (2, 8)

REPORT = ("pandas", "matplotlib", "jinja2", "rich")
NOTEBOOK = ("jupyterlab", "ipywidgets", "itables", "nbclient")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FONT = "fonts/truetype/dejavu/DejaVuSans.ttf"


@dataclass(frozen=True)
class Fact:
    """``found`` is what stands there, in words; ``remedy`` is what to do when ``ok`` is false, else empty."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Ability:
    """Something that diagkit can do; ``lacks`` holds the names of the facts that keep it from working here."""

    name: str
    summary: str
    lacks: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.lacks


_SIMULATION = ("torch", "simulator", "ranks")

# name, what it is, the facts that it needs.
_ABILITIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("traces", "open and diagnose traces that were recorded elsewhere", ("Python",)),
    ("record", "record, guard and heal a model of your own", ("Python", "torch")),
    (
        "demo",
        "see the crash and the guard without an accelerator",
        ("Python", *_SIMULATION),
    ),
    ("report", "tables, figures and reports", ("Python", "report packages")),
    ("notebooks", "the notebooks", ("Python", *_SIMULATION, "report packages", "notebook packages")),
    ("browser tests", "the tests that drive JupyterLab in a browser", ("notebook packages", "browser")),
)


def facts() -> list[Fact]:
    """Try everything once. Takes about as long as importing torch."""
    probes: list[Callable[[], Iterable[Fact]]]
    probes = [_python, _torch, _simulation, _ranks, _packages, _browser]
    return [fact for probe in probes for fact in probe()]


def abilities(found: list[Fact]) -> list[Ability]:
    """What works, given these facts."""
    lacking = {fact.name for fact in found if not fact.ok}
    return [Ability(name, text, tuple(n for n in needs if n in lacking)) for name, text, needs in _ABILITIES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(repr(name) for name, _, _ in _ABILITIES)
    parser.add_argument("need", nargs="*", metavar="ABILITY", help=f"leave with 1 unless these work: {names}")
    parser.add_argument("--json", action="store_true", help="print facts and abilities as JSON")


def main(args: argparse.Namespace) -> int:
    known = [name for name, _, _ in _ABILITIES]
    for word in args.need:
        if word not in known:
            raise UsageError("unknown ability", found=repr(word), expected=f"one of {', '.join(known)}")
    found = facts()
    can = abilities(found)
    if args.json:
        print(json.dumps(_as_json(found, can), indent=2))
    else:
        print("\n".join(_as_text(found, can)))
    return int(any(not ability.works for ability in can if ability.name in args.need))


def _as_json(found: list[Fact], can: list[Ability]) -> dict[str, object]:
    return {
        "diagkit": __version__,
        "facts": [asdict(fact) for fact in found],
        "abilities": [{**asdict(ability), "works": ability.works} for ability in can],
    }


def _as_text(found: list[Fact], can: list[Ability]) -> Iterable[str]:
    yield f"diagkit {__version__}"
    yield ""
    width = max(len(fact.name) for fact in found)
    for fact in found:
        yield f"  {'ok' if fact.ok else '--':<3} {fact.name:<{width}}  {fact.found}"
    yield ""
    yield "What works here"
    width = max(len(ability.name) for ability in can)
    for ability in can:
        why = "" if ability.works else f"  (needs: {', '.join(ability.lacks)})"
        yield f"  {'yes' if ability.works else 'no':<3} {ability.name:<{width}}  {ability.summary}{why}"
    remedies = [fact for fact in found if fact.remedy]
    if remedies:
        yield ""
        yield "What to do for the rest"
        for fact in remedies:
            yield f"  {fact.name}: {fact.remedy}"


def _python() -> Iterable[Fact]:
    old = sys.version_info < (3, 10)
    yield Fact(
        "Python",
        not old,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "diagkit needs Python 3.10 or newer" if old else "",
    )


def _torch() -> Iterable[Fact]:
    install = f"pip install 'torch>={_dots(build.OLDEST_TORCH)}' (never on a training node, which has its own)"
    try:
        import torch
    except ImportError as error:
        absent = importlib.util.find_spec("torch") is None
        text = "not installed" if absent else f"installed, but does not import: {_first_line(error)}"
        yield Fact("torch", False, text, install)
        yield Fact("accelerator", True, "unknown without torch")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    ok = version >= CAPTURE_FLOOR
    remedy = "" if ok else f"diagkit needs torch {_dots(CAPTURE_FLOOR)} or newer: {install}"
    yield Fact("torch", ok, torch.__version__, remedy)
    yield Fact("accelerator", True, _accelerator())


def _accelerator() -> str:
    import torch

    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return "none; the demo and the notebooks simulate one and say so"
    return f"{accelerator.current_accelerator()}, {accelerator.device_count()} visible"


def _simulation() -> Iterable[Fact]:
    tools = list(_compiler())
    yield from tools
    yield _simulator(all(tool.ok for tool in tools))


def _compiler() -> Iterable[Fact]:
    """Compile two lines for real: a compiler without its headers, and Python without its own, are common."""
    install = "Debian or Ubuntu: apt-get install g++ python3-dev; conda: conda install cxx-compiler"
    try:
        command = build.compiler()
    except MissingDependency as error:
        there = _header().exists()
        yield Fact("C++ compiler", False, str(error.found), install)
        yield Fact("Python headers", there, f"{'' if there else 'no '}{_header()}", "" if there else install)
        return
    yield Fact("C++ compiler", *_compiles(command, "#include <vector>\nstd::vector<int> v;\n", install))
    yield Fact("Python headers", *_compiles([*command, f"-I{_header().parent}"], "#include <Python.h>\n", install))


def _header() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["include"], "Python.h")


def _compiles(command: list[str], source: str, install: str) -> tuple[bool, str, str]:
    try:
        line = [*command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
        result = subprocess.run(line, input=source, capture_output=True, text=True, timeout=60)
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]} does not run: {_first_line(error)}", install
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if "error" in line), "does not compile")
        return False, f"{command[0]}: {reason}", install
    return True, command[1].removeprefix("-I") if command[1:] else _first_line(version), ""


def _simulator(can_compile: bool) -> Fact:
    """Whether the simulated accelerator is compiled already, and where it is or will be kept."""
    if importlib.util.find_spec("torch_npu") is not None:
        # Both would be PyTorch's one private-use backend, and there can only be one.
        return Fact("simulator", False, "torch_npu is installed, so nothing is simulated here", "use the real device")
    try:
        folder = build.compiled()
        cache = build.cache_root()
    except DiagkitError as error:
        return Fact("simulator", False, f"{error.what}: found {error.found}", error.remedy or "")
    if folder is not None:
        return Fact("simulator", True, f"compiled, in {folder}")
    if can_compile:
        return Fact("simulator", True, f"not compiled yet (half a minute, once), goes to {cache}")
    return Fact("simulator", False, "not compiled yet, and cannot be", "install the compiler and the headers first")


def _ranks() -> Iterable[Fact]:
    """Ranks on one machine meet on the loopback address, which some containers and laptops lack."""
    try:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Fact("ranks", False, f"127.0.0.1 cannot be used: {error}", "allow this user the loopback network")
    else:
        yield Fact("ranks", True, "can meet on 127.0.0.1")


def _packages() -> Iterable[Fact]:
    for name, packages in (("report packages", REPORT), ("notebook packages", NOTEBOOK)):
        versions = {package: _version(package) for package in packages}
        lacking = [package for package, version in versions.items() if version is None]
        words = [f"{package} {version or 'missing'}" for package, version in versions.items()]
        yield Fact(name, not lacking, ", ".join(words), f"pip install {' '.join(lacking)}" if lacking else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _browser() -> Iterable[Fact]:
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    font = any((folder / FONT).exists() for folder in (pathlib.Path("/usr/share"), pathlib.Path("/usr/local/share")))
    playwright = _version("playwright")
    words = [browser or "no Chromium", f"{'' if font else 'no '}DejaVu fonts", f"playwright {playwright or 'missing'}"]
    ok = bool(browser and font and playwright)
    remedy = "for the browser tests alone: apt-get install chromium fonts-dejavu-core; pip install playwright"
    yield Fact("browser", ok, ", ".join(words), "" if ok else remedy)


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [type(text).__name__])[0]
