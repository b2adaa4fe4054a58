"""Starting the simulator: it compiles once however many ask at once, and says in one line what it lacks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import simdevice_start
from ranks import RankResult, run_ranks

from diagkit.errors import MissingDependency, UnsupportedTorch
from diagkit.lab.simdevice import build


def start(env: dict[str, str | None], ranks: int = 1, timeout: float = 280) -> list[RankResult]:
    return run_ranks(simdevice_start.main, ranks, env=env, timeout=timeout, check=False)


def one_line(result: RankResult) -> str:
    """The single line that a refused start leaves on standard error."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.rc == 2 and len(lines) == 1 and lines[0].startswith("error: "), result
    return lines[0]


@pytest.fixture(scope="module")
def library(compiler: str) -> Path:
    """The compiled simulator's folder; compiled now if it was not."""
    return build.built(announce=False)


@pytest.mark.slow
def test_eight_ranks_with_an_empty_cache_compile_once_and_all_run(compiler: str, tmp_path: Path) -> None:
    results = start({"DIAGKIT_CACHE": str(tmp_path)}, ranks=8)
    assert [r.rc for r in results] == [0] * 8, "\n".join(r.stderr for r in results)
    assert all(json.loads(r.stdout)["total"] == 6.0 for r in results)
    assert sum("compiling the simulated accelerator" in r.stderr for r in results) == 1
    (log,) = tmp_path.glob("*.log")
    assert log.read_text().count("== compiled") == 1
    (folder,) = [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    assert sorted(file.name for file in folder.iterdir()) == ["device.so", "hccl.so"]


def test_a_killed_process_leaves_no_stale_lock(library: Path) -> None:
    lock = library.parent / f"{library.name}.lock"
    code = (
        f"import fcntl, time; f = open({str(lock)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(300)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with build._lock(lock):
        assert time.monotonic() - began < 5


@pytest.fixture
def borrowed_cache(library: Path, tmp_path: Path) -> Path:
    """A cache folder that already has the libraries, so that nothing needs compiling."""
    target = tmp_path / "diagkit" / library.name
    target.mkdir(parents=True)
    for file in library.iterdir():
        os.link(file, target / file.name)
    return target.parent


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null"])
def test_a_home_that_cannot_be_written_falls_back_to_a_folder_of_this_users(
    home: str, library: Path, tmp_path: Path
) -> None:
    user = "someone"
    fallback = tmp_path / f"diagkit-{user}"
    (fallback / library.name).mkdir(parents=True)
    for file in library.iterdir():
        os.link(file, fallback / library.name / file.name)
    env = {"HOME": home, "TMPDIR": str(tmp_path), "LOGNAME": user, "DIAGKIT_CACHE": None, "XDG_CACHE_HOME": None}
    (result,) = start(env)
    assert result.rc == 0, result.stderr
    assert json.loads(result.stdout)["cache"] == str(fallback / library.name)


def test_the_cache_follows_xdg(borrowed_cache: Path) -> None:
    (result,) = start({"XDG_CACHE_HOME": str(borrowed_cache.parent), "DIAGKIT_CACHE": None})
    assert result.rc == 0 and json.loads(result.stdout)["cache"].startswith(str(borrowed_cache))


def test_a_chosen_cache_that_cannot_be_written_is_named(compiler: str) -> None:
    line = one_line(start({"DIAGKIT_CACHE": "/proc/nowhere"})[0])
    assert (
        "cache folder cannot be written: found /proc/nowhere (at DIAGKIT_CACHE)" in line and "Set DIAGKIT_CACHE" in line
    )


def test_a_missing_compiler_is_named_with_how_to_get_one(tmp_path: Path) -> None:
    line = one_line(start({"PATH": str(tmp_path), "CXX": None, "DIAGKIT_CACHE": str(tmp_path)})[0])
    assert "needs a C++ compiler: found no c++, g++ or clang++ on the path" in line and "apt-get install g++" in line
    line = one_line(start({"CXX": "no-such-compiler -O3", "DIAGKIT_CACHE": str(tmp_path)})[0])
    assert "named by CXX is not there: found no-such-compiler" in line


def test_a_compiled_simulator_needs_no_compiler(borrowed_cache: Path, tmp_path: Path) -> None:
    (result,) = start({"PATH": str(tmp_path), "CXX": None, "DIAGKIT_CACHE": str(borrowed_cache)})
    assert result.rc == 0, result.stderr


def test_a_compiler_that_fails_shows_its_first_error_and_the_log(compiler: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text(
        "#!/bin/sh\ncase \"$1\" in -dump*) echo 12; exit 0;; esac\necho 'x.h:1: error: out of luck' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    result = start({"CXX": str(broken), "DIAGKIT_CACHE": str(tmp_path)})[0]
    last = result.stderr.splitlines()[-1]
    assert (
        result.rc == 2
        and "compiling the simulated accelerator failed (device, hccl): found x.h:1: error: out of luck" in last
    )
    (log,) = tmp_path.glob("*.log")
    assert str(log) in last and "== hccl" in log.read_text()
    assert not list(tmp_path.glob("build-*")), "what a failed build wrote is gone"


def test_python_headers_are_asked_for_when_they_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(MissingDependency, match=r"Python's C headers: found no Python.h in .*python3-dev"):
        build._include_python()


@pytest.mark.parametrize("version", ["2.7.1", "1.13.1+cu117", "2.7.0.dev20250601"])
def test_a_torch_older_than_2_8_is_refused(version: str) -> None:
    facts = dataclasses.replace(build.torch_facts(), version=version)
    with pytest.raises(UnsupportedTorch, match=f"too old for the simulated accelerator: found {version.split('+')[0]}"):
        build.check_torch(facts)


def test_a_torch_that_is_not_there_or_too_old_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    module = tmp_path / "torch" / "__init__.py"
    module.write_text("raise ImportError('no torch here')\n")
    command = [sys.executable, str(Path(simdevice_start.__file__))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(build.__file__).parents[3])])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(
        "error: the simulated accelerator needs torch: found no torch here"
    )
    module.write_text(
        "from types import SimpleNamespace as N\n__version__ = '2.6.0'\n"
        "version = N(cuda=None)\n_C = N(_GLIBCXX_USE_CXX11_ABI=True)\n"
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "found 2.6.0, expected 2.8 or newer" in done.stderr and done.stderr.count("\n") == 1


def test_it_never_starts_beside_a_real_accelerators_plug_in(library: Path, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported, though it must only be looked for')\n")
    line = one_line(start({"PYTHONPATH": str(tmp_path)})[0])
    assert "never started beside a real one: found torch_npu is installed" in line


def test_it_never_takes_a_device_type_that_is_taken(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "taken.py"
    script.write_text(
        "import torch, simdevice_start\ntorch.utils.rename_privateuse1_backend('other')\nsimdevice_start.main()\n"
    )
    (result,) = run_ranks(script, 1, env={"PYTHONPATH": str(Path(__file__).parent)}, check=False)
    assert "device type is already taken in this process: found other" in one_line(result)


def test_importing_the_lab_starts_nothing_and_imports_no_torch() -> None:
    code = "import sys, diagkit.lab, diagkit.lab.simdevice; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(build.__file__).parents[3], timeout=60)


def test_source_torch_and_compiler_each_change_the_cache_key(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, command = build.torch_facts(), build.compiler()
    assert build.compiler_key(command) != build.compiler_key([*command, "-m64"])
    keys = {build.build_key(facts), build.build_key(dataclasses.replace(facts, version="2.99.0"))}
    copied = tmp_path / "source"
    shutil.copytree(build.HERE, copied)
    (copied / "memory.h").write_text((copied / "memory.h").read_text() + "// changed\n")
    monkeypatch.setattr(build, "HERE", copied)
    keys.add(build.build_key(facts))
    assert len(keys) == 3


def test_until_its_first_use_a_mesh_may_choose_the_device_by_local_rank(library: Path) -> None:
    ranks = run_ranks(simdevice_start.mesh, 2, timeout=200)
    assert [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks] == [[False, 0], [False, 1]]
