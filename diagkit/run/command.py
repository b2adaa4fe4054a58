"""``diagkit run [OPTIONS] SCRIPT ARGS`` and ``diagkit run [OPTIONS] -m MODULE ARGS``: records a job unchanged.

Also under a launcher: ``torchrun --nproc-per-node 2 -m diagkit run SCRIPT``. The script's code, arguments, output, exit
code, signals and tracebacks are its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from diagkit.errors import UsageError
from diagkit.run.arrivals import when_imported
from diagkit.run.door import Door, open_door
from diagkit.run.ending import end_text, failure_text, hard_coded, say, spawned_text, well
from diagkit.run.options import Options
from diagkit.run.script import Program, execute, module_program, script_program, set_the_stage
from diagkit.run.spawned import SpawnCover

_SAID = ("out", "detail", "ranks", "include", "exclude", "limit", "quiet", "engines")
_WITH_VALUE = {f"--{name}" for name in _SAID}

_prepared: list[tuple[Program, Door | None, SpawnCover]] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "diagkit run [options] [-m MODULE | SCRIPT] [ARGS ...]"
    parser.add_argument("--out", metavar="DIR", help="folder of runs; this run makes its own in it (default: runs)")
    parser.add_argument("--simulate", action="store_true", help="run on the simulated accelerator, and say so")
    parser.add_argument("--detail", metavar="LEVEL", help="phases, transitions (default) or full")
    parser.add_argument("--ranks", metavar="LIST", help="record these ranks only: 0-3,7")
    parser.add_argument("--include", metavar="PATTERNS", help="watch only tensors with such names: '*.q_proj.*,*norm*'")
    parser.add_argument("--exclude", metavar="PATTERNS", help="... and none with such names")
    parser.add_argument("--limit", metavar="SIZE", help="size of a rank's trace from which on only failures are kept")
    parser.add_argument("--quiet", metavar="SECONDS", help="say where a rank stands still so long (300; 0: never)")
    parser.add_argument("--engines", metavar="CLASSES", help="classes of engines to attach to: package.module:Class")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run this module, as python -m would")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the script, as python would run it")
    parser.epilog = "Options but --simulate may also stand in the environment as DIAGKIT_OPTION (--out: DIAGKIT_TRACE)."


def cut(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the script: it begins with the first word that is no option of ours."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "-m":
            return list(words[: at + 2]), list(words[at + 2 :])
        if word == "--":
            return [*words[:at], *words[at + 1 : at + 2]], list(words[at + 2 :])
        if not word.startswith("-") or word == "-":
            return list(words[: at + 1]), list(words[at + 1 :])
        at += 2 if word in _WITH_VALUE else 1
    return list(words), []


def main(args: argparse.Namespace) -> int:
    """Prepares the run; everything that can be wrong with our own options is told here."""
    if (args.module is None) == (args.script is None):
        raise UsageError("nothing to run", expected="a script, or -m MODULE", remedy="diagkit run train.py --epochs 1")
    said = {name: value for name in _SAID if (value := getattr(args, name)) is not None}
    options = Options.from_environment().saying(said)
    if args.simulate:
        from diagkit.lab import simulate

        simulate()
    if args.module is not None:
        set_the_stage(os.getcwd(), [args.module, *args.rest])
        program = module_program(args.module)
        sys.argv[0] = str(program.module.__file__)
    else:
        set_the_stage(os.path.dirname(os.path.abspath(args.script)), [args.script, *args.rest])
        program = script_program(args.script)
    spawns = SpawnCover(str(program.module.__file__), options, args.simulate)
    when_imported("multiprocessing.spawn", spawns.arrived)
    _prepared[:] = [(program, open_door(options), spawns)]
    return 0


def foreign() -> None:
    """Runs what `main` prepared, outside of everything that our command line does with errors."""
    program, door, spawns = _prepared.pop()

    def ended(error: BaseException | None) -> None:
        watch = None if door is None else door.watch
        folder = spawns.folder()
        if folder is not None and (watch is None or watch.recorder is None):
            say(spawned_text(folder, failed=error is not None and not well(error)))
        elif error is None or well(error):
            say(end_text(watch))
        else:
            say(hard_coded(error) or failure_text(watch, error, "" if door is None else door.fault))
        if error is not None:
            spawns.leave()
            if door is not None:
                door.close()

    execute(program, ended)
