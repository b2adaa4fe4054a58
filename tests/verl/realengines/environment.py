"""Build the environment that verl's own engines run in: one venv, and one folder for each verl release.

``python tests/verl/realengines/environment.py`` builds ``.venv-verl`` beside the project's own environment, or does
nothing when the one that is there was built from the same lists. About a minute and 1.8 GB. Needs pip's usual access
to packages and a torch built for the CPU; on a failure it prints one line that says what is missing, and exits 2.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent
HOME = ROOT / ".venv-verl"
PYTHON = HOME / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"

RELEASES = ("0.8.0", "0.9.1")
"""0.8.0 has the first part of the fix only (the export of #6463); 0.9.1 has all of it."""

_CHECK = """
import importlib.metadata as m, torch
names = sorted({d.metadata["Name"].lower() for d in m.distributions()})
cuda = [n for n in names if n.startswith(("nvidia-", "cuda-")) or n == "triton"]
print(f"torch {torch.__version__}")
raise SystemExit(f"CUDA came in: torch built for {torch.version.cuda}, {cuda}" if cuda or torch.version.cuda else 0)
"""


class EnvironmentFailed(Exception):
    """The environment could not be built; the message is one line that says which step failed and what to do."""


def release_folder(release: str) -> Path:
    """Return the folder that holds one verl release and nothing else; it goes first on the path of the driver."""
    return HOME / "verl" / release


def _fingerprint() -> str:
    text = REQUIREMENTS.read_text() + repr(RELEASES) + sys.version
    return hashlib.sha256(text.encode()).hexdigest()


def is_built() -> bool:
    """Say whether the environment is there and was built from the lists as they are now."""
    stamp = HOME / "built-from"
    return stamp.is_file() and stamp.read_text() == _fingerprint()


def _step(what: str, *command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise EnvironmentFailed(f"{what} failed: {lines[-1]}")


def build(torch_index: str = "", pip_args: str = "") -> float:
    """Build the environment and return the seconds it took (0.0 when it was there already).

    ``torch_index`` is one more package index, for a torch built for the CPU; ``pip_args`` are further arguments for
    pip. Raises EnvironmentFailed when a package cannot be had, or when a CUDA build of torch came in.
    """
    if is_built():
        return 0.0
    start = time.monotonic()
    venv.EnvBuilder(clear=True, with_pip=True).create(HOME)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    install += shlex.split(pip_args)
    # Of two builds of one version pip takes the one with the longer label, and that is the CPU's "+cpu".
    index = ["--extra-index-url", torch_index] if torch_index else []
    _step("installing the pinned packages", *install, *index, "-r", REQUIREMENTS)
    for release in RELEASES:
        _step(f"installing verl {release}", *install, "--target", release_folder(release), f"verl=={release}")
    _step("the check that torch is a CPU build (make TORCH_INDEX=... gives pip one)", PYTHON, "-c", _CHECK)
    (HOME / "built-from").write_text(_fingerprint())
    return time.monotonic() - start


def main() -> int:
    """Build, say how long it took, and exit 0, or 2 with the reason."""
    parser = argparse.ArgumentParser(description="Build the environment that verl's own engines run in.")
    parser.add_argument("--torch-index", default="", help="one more package index, for a torch built for the CPU")
    parser.add_argument("--pip-args", default="", help="further arguments for every pip install")
    options = parser.parse_args()
    try:
        seconds = build(options.torch_index, options.pip_args)
    except EnvironmentFailed as failure:
        print(f"verl's environment could not be built: {failure}", file=sys.stderr)
        return 2
    print(f"{HOME.name}: " + (f"built in {seconds:.0f} s" if seconds else "up to date"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
