"""Make one Python environment for diagkit, or find that the one there still fits: what every make target stands on.

    python3 .ci/venv.py --venv .venv [--torch 2.13.0] [--torch-index URL] [--extra dev] [--pip-args "..."]

Standard library only, and readable for any Python 3, so that an old one gets a sentence instead of a syntax error.
"""

import argparse
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLOOR = (3, 10)
STAMP = "diagkit-stamp"
# torch first and alone: whatever else is installed then meets the torch that was chosen, and none other comes along.
STEPS = 3


def main():
    args = _arguments()
    venv = pathlib.Path(args.venv)
    stamp = venv / STAMP
    wanted = _fingerprint(args)
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    _check_python()
    start = time.monotonic()
    print("Setting up {} with Python {} and torch {} (once; later runs reuse it)".format(
        venv, platform.python_version(), args.torch), flush=True)
    if (venv / "bin" / "python").exists():
        _say(1, "renewing the environment that is there")
    else:
        _say(1, "creating the environment")
        _create(venv)
    log = venv / "setup.log"
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["-c", _constraints(venv, args.torch), *shlex.split(args.pip_args)]
    # The pip that a Python ships may be years old and resolves worse. No harm if a newer one is not to be had.
    _pip([*pip, "--quiet", "pip", "setuptools>=77"], log, must=False)
    _say(2, "installing torch {}".format(args.torch))
    index = ["--index-url", args.torch_index] if args.torch_index else []
    _pip([*pip, *index, "torch==" + args.torch], log)
    _say(3, "installing diagkit[{}] and what it needs".format(args.extra))
    _pip([*pip, "--no-build-isolation", "-e", "{}[{}]".format(ROOT, args.extra)], log)
    stamp.write_text(wanted)
    print("{} is ready after {:.0f} s".format(venv, time.monotonic() - start), flush=True)
    return 0


def _arguments():
    parser = argparse.ArgumentParser(description="Make or reuse one environment.")
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    parser.add_argument("--extra", default="dev")
    parser.add_argument("--pip-args", default="", help="further arguments for every pip install")
    return parser.parse_args()


def _check_python():
    if sys.version_info < FLOOR:
        _stop("Python {} is too old: diagkit needs 3.10 or newer".format(platform.python_version()),
              "Install one, then: make PYTHON=/path/to/python3.12 ...")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        _stop("this Python cannot make environments: ensurepip is missing",
              "On Debian or Ubuntu: apt-get install python3-venv")


def _create(venv):
    """A half-made environment is worse than none: it would be reused."""
    result = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if result.returncode:
        shutil.rmtree(str(venv), ignore_errors=True)
        _stop("could not create {}: {}".format(venv, (result.stderr or result.stdout).strip().split("\n")[-1]),
              "On Debian or Ubuntu: apt-get install python3-venv; else look at free space and permissions here")


def _constraints(venv, torch):
    """The tested versions, with another torch in the place of the tested one when another was asked for."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if "torch==" + torch not in lines:
        # Another torch may need another setuptools: 2.10 to 2.12 want one below 82.
        lines = [line for line in lines if not line.startswith(("torch==", "setuptools=="))] + ["torch==" + torch]
    path = venv / "constraints.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _pip(command, log, must=True):
    """Run pip, its talk in a log, one short line of progress on the screen."""
    begun, done, doing = time.monotonic(), 0, "found {} packages"
    live = sys.stdout.isatty()
    with log.open("a") as sink:
        sink.write("\n$ " + " ".join(command) + "\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env=dict(os.environ, PYTHONUNBUFFERED="1"))
        last = begun
        for line in process.stdout:
            sink.write(line)
            if line.startswith(("Collecting ", "Processing ")):
                done += 1
            now = time.monotonic()
            if line.startswith("Installing collected") and done:
                doing, last = "unpacking {} packages", begun
            if done and now - last > (0.2 if live else 10):
                _progress("      {}, {:.0f} s".format(doing.format(done), now - begun), live)
                last = now
        code = process.wait()
    if live:
        print("\r" + " " * 60 + "\r", end="", flush=True)
    if code and must:
        words = [line for line in log.read_text().splitlines() if line.startswith("ERROR")][-3:]
        _stop("pip could not install: " + (" | ".join(words) or "no reason given"),
              "The whole talk is in {}. Behind a mirror set PIP_INDEX_URL, or TORCH_INDEX for torch alone".format(log))


def _progress(text, live):
    print(("\r" + text.ljust(60)) if live else text, end="" if live else "\n", flush=True)


def _say(step, text):
    print("[{}/{}] {}".format(step, STEPS, text), flush=True)


def _stop(problem, remedy):
    print("error: {}. {}.".format(problem, remedy), file=sys.stderr)
    sys.exit(2)


def _fingerprint(args):
    """Changes when another environment is wanted: other requirements, other pins, another torch or another Python."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    for word in (args.torch, args.torch_index, args.extra, platform.python_version(), str(ROOT)):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest() + "\n"


if __name__ == "__main__":
    sys.exit(main())
