"""Compiles the simulated accelerator once, against the torch that is installed, and finds it again later.

Rules: one compilation for however many processes start at once (a file lock that the kernel drops when its holder
dies); a library appears in the cache whole or not at all; a changed source, torch, Python, compiler or machine gets
another folder. Whatever is missing is said in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diagkit.errors import MissingDependency, SimulatorError, UnsupportedTorch

HERE = Path(__file__).parent
OLDEST_TORCH = (2, 8)
LIBRARIES = ("device", "hccl")


@dataclass(frozen=True)
class TorchFacts:
    """What a compilation must know about the installed torch."""

    version: str
    folder: Path
    cxx11_abi: bool
    pybind: tuple[str, ...] = ()  # what marks modules that share types; torch 2.8 names it, later ones need none

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def torch_facts() -> TorchFacts:
    """The installed torch, or one line that says what is wrong with it."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            "the simulated accelerator needs torch", found=str(error), remedy="Install torch 2.8 or newer"
        ) from error
    facts = TorchFacts(
        version=str(torch.__version__),
        folder=Path(torch.__file__).parent,
        cxx11_abi=bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        pybind=tuple(
            f'-DPYBIND11_{name}="{mark}"'
            for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
            if (mark := getattr(torch._C, f"_PYBIND11_{name}", None))
        ),
    )
    check_torch(facts)
    return facts


def check_torch(facts: TorchFacts) -> None:
    """Raises :class:`UnsupportedTorch` for a torch that is older than 2.8, whose FSDP2 has other parts."""
    if facts.release < OLDEST_TORCH:
        raise UnsupportedTorch(
            "this torch is too old for the simulated accelerator",
            found=facts.version,
            expected="2.8 or newer",
            remedy="Install a newer torch, or work with a recorded trace, which needs none",
        )
    if not (facts.folder / "include" / "ATen" / "ATen.h").exists():
        raise UnsupportedTorch(
            "this torch comes without its C++ headers",
            found=str(facts.folder),
            remedy="Install a wheel from PyPI or download.pytorch.org",
        )


def compiler() -> list[str]:
    """The C++ compiler as a command: ``$CXX`` if it is set, else c++, g++ or clang++ from the path."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise MissingDependency(
                "the C++ compiler named by CXX is not there", found=chosen, remedy="Unset CXX, or name an installed one"
            )
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise MissingDependency(
        "the simulated accelerator needs a C++ compiler",
        found="no c++, g++ or clang++ on the path",
        remedy="Install one (Debian: apt-get install g++), or set CXX",
    )


def cache_root() -> Path:
    """Where compiled simulators live.

    ``DIAGKIT_CACHE`` if it is set (an error if it cannot be written), else the first of these that can be written:
    ``$XDG_CACHE_HOME/diagkit``, ``~/.cache/diagkit``, a folder of this user's under the temporary one.
    """
    wanted = os.environ.get("DIAGKIT_CACHE", "").strip()
    if wanted:
        folder = Path(wanted).expanduser()
        if not _writable(folder):
            raise SimulatorError(
                "the cache folder cannot be written",
                found=str(folder),
                where="DIAGKIT_CACHE",
                remedy="Set DIAGKIT_CACHE to a folder of yours, or unset it",
            )
        return folder
    xdg = os.environ.get("XDG_CACHE_HOME", "").strip()
    candidates = [Path(xdg) / "diagkit"] if xdg else []
    with contextlib.suppress(RuntimeError):  # no home at all
        candidates.append(Path.home() / ".cache" / "diagkit")
    for folder in candidates:
        if _writable(folder):
            return folder
    return _temporary_cache()


def _temporary_cache() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    folder = Path(tempfile.gettempdir()) / f"diagkit-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The folder's name is known to everyone on the machine; libraries are loaded from it, so it must be ours alone.
    if not _writable(folder) or folder.stat().st_uid != os.getuid():
        raise SimulatorError(
            "no folder for the compiled simulator", found=str(folder), remedy="Set DIAGKIT_CACHE to a folder of yours"
        )
    return folder


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def build_key(facts: TorchFacts) -> str:
    """Names the libraries of one combination of torch, Python, machine and source, whatever compiler made them."""
    digest = hashlib.sha256()
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    for part in (str(facts), str(sysconfig.get_config_var("SOABI")), platform.machine()):
        digest.update(part.encode() + b"\0")
    return f"sim-torch{facts.version}-{digest.hexdigest()[:16]}"


def compiler_key(command: list[str]) -> str:
    """Eight characters that stand for a compiler command and the version that it reports."""
    return hashlib.sha256(f"{command} {_compiler_version(command)}".encode()).hexdigest()[:8]


def _compiler_version(command: list[str]) -> str:
    try:
        done = subprocess.run(
            [*command, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependency("the C++ compiler does not start", found=f"{' '.join(command)}: {error}") from error
    return done.stdout.strip()


def _include_python() -> Path:
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").exists():
        raise MissingDependency(
            "the collective backend of the simulated accelerator needs Python's C headers",
            found=f"no Python.h in {folder}",
            remedy="Install them (Debian: apt-get install python3-dev)",
        )
    return folder


def _commands(facts: TorchFacts, command: list[str], out: Path) -> dict[str, list[str]]:
    torch_lib = facts.folder / "lib"
    common = [
        *command,
        "-O1",
        "-w",
        # The standard that each torch builds its own extensions with.
        f"-std={'c++20' if facts.release >= (2, 12) else 'c++17'}",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(facts.cxx11_abi)}",
        f"-I{facts.folder / 'include'}",
        f"-I{facts.folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
    ]
    linked = [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-lc10", "-ltorch_cpu"]
    return {
        "device": [*common, str(HERE / "device.cpp"), "-o", str(out / "device.so"), *linked],
        "hccl": [
            *common,
            "-DTORCH_EXTENSION_NAME=hccl",
            *facts.pybind,
            f"-I{_include_python()}",
            str(HERE / "hccl.cpp"),
            "-o",
            str(out / "hccl.so"),
            *linked,
            "-ltorch",
            "-ltorch_python",
        ],
    }


def compiled() -> Path | None:
    """The folder with both libraries if they are there already; compiles nothing. Raises what :func:`built` raises."""
    root, key = cache_root(), build_key(torch_facts())
    if os.environ.get("CXX"):  # who names a compiler wants its work; anyone else takes what is there
        folders = [root / f"{key}-{compiler_key(compiler())}"]
    else:
        folders = sorted(root.glob(f"{key}-????????"))
    return next((folder for folder in folders if _complete(folder)), None)


def built(announce: bool = True) -> Path:
    """The folder with both libraries; compiles them first if they are not there (about 20 s on two free cores).

    ``announce`` prints one line to standard error before a compilation, because it is long enough to look like a hang.
    Raises :class:`MissingDependency`, :class:`UnsupportedTorch` or :class:`SimulatorError`, each with what to do.
    """
    there = compiled()
    if there is not None:
        return there
    facts, command = torch_facts(), compiler()
    folder = cache_root() / f"{build_key(facts)}-{compiler_key(command)}"
    with _lock(folder.parent / f"{folder.name}.lock"):
        if not _complete(folder):
            _compile(facts, command, folder, announce)
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / f"{name}.so").exists() for name in LIBRARIES)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # flock, not a marker file: the kernel drops it with its holder, so a killed process leaves no stale lock.
    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(facts: TorchFacts, command: list[str], folder: Path, announce: bool) -> None:
    if announce:
        print(
            f"diagkit: compiling the simulated accelerator for torch {facts.version} (once, about half a minute) ...",
            file=sys.stderr,
            flush=True,
        )
    for leftover in folder.parent.glob(f"build-{folder.name}-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"build-{folder.name}-") as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        running = {
            name: subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for name, line in _commands(facts, command, out).items()
        }
        outputs = {name: process.communicate()[1] for name, process in running.items()}
        log = folder.parent / f"{folder.name}.log"
        log.write_text("\n".join(f"== {name}\n{text}" for name, text in outputs.items()))
        failed = [name for name, process in running.items() if process.returncode != 0]
        if failed:
            first = next(
                (line for line in outputs[failed[0]].splitlines() if "error" in line), outputs[failed[0]][:200]
            )
            raise SimulatorError(
                f"compiling the simulated accelerator failed ({', '.join(failed)})",
                found=first.strip(),
                where=str(log),
                remedy="Read that log, then try another compiler through CXX",
            )
        with open(log, "a") as handle:
            handle.write("== compiled\n")
        out.rename(folder)
