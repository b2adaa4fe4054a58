"""The command line: which commands there are, and what happens when one fails.

A command lives in its own room, as a module with ``add_arguments(parser)`` and ``main(args) -> int``. That module is
imported only when its command is chosen, so ``--help`` works without torch and costs nothing. An error is one line on
stderr that says how to mend it, with exit code 2. A command that runs somebody else's program also has ``cut(words)``,
which says where that program's words begin, and ``foreign()``, which runs it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from diagkit import __version__
from diagkit.errors import DiagkitError, MissingDependency
from diagkit.language import language

__all__ = ["COMMANDS", "main"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """``module`` is imported when the command is chosen; ``help`` is shown without importing it."""

    name: str
    module: str
    help: str


class Room(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def main(self, args: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    Command("demo", "diagkit.demo.command", "run both engines, guarded and unguarded, and show what breaks and where"),
    Command("doctor", "diagkit.doctor", "say what will work on this machine, and what to do for the rest"),
    Command("diagnose", "diagkit.diagnosis.diagnose_command", "find the hazards in a folder of traces"),
    Command("compare", "diagkit.trace.compare_command", "say where two runs part first: which phase, call and rows"),
    Command(
        "export", "diagkit.trace.export", "write a trace as tables (Parquet, CSV), or as a trace once more, redacted"
    ),
    Command("report", "diagkit.views.report.command", "tell a run's story in one file, for whoever was not there"),
    Command("explain", "diagkit.diagnosis.explain_command", "say what the first failure in a job's log means"),
    Command("run", "diagkit.run.command", "run a training script unchanged, and record where its parameters live"),
    Command(
        "hazards", "diagkit.diagnosis.hazards_command", "teach a hazard: what happens, what shows it, what mends it"
    ),
)

# Packages that a command may rightly miss; any other missing module is a fault of ours and keeps its traceback.
_OPTIONAL = frozenset(
    {"torch", "numpy", "pandas", "matplotlib", "jinja2", "rich", "IPython", "ipywidgets", "itables", "pyarrow"}
)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that names the way out."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.split())
        print(f"{self.prog}: error: {text}{'' if text.endswith('?') else '.'} Try: {self.prog} --help", file=sys.stderr)
        sys.exit(EXIT_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 findings or differences, 2 an error."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, subparsers = _parsers()
    chosen = next((word for word in words if not word.startswith("-")), None)
    command = next((c for c in COMMANDS if c.name == chosen), None)
    if command is None:
        if chosen is not None:
            parser.error(_unknown(chosen))
        parser.parse_args(words)  # --help and --version leave here
        parser.print_help()
        return EXIT_ERROR if words else 0
    try:
        room = cast(Room, importlib.import_module(command.module))
        own = subparsers[command.name]
        room.add_arguments(own)
        words, rest = _cut(room, words, command.name)
        args, strange = parser.parse_known_args(words)
        args.rest = rest
        if strange:  # argparse would blame the top, whose --help does not know this command's options
            own.error(f"unrecognized arguments: {' '.join(strange)}")
        with language(getattr(args, "lang", "en")):
            code = room.main(args)
        foreign: Callable[[], None] | None = getattr(room, "foreign", None)
        if foreign is None:
            sys.stdout.flush()
            return code
    except DiagkitError as error:
        return _fail(command, error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        return _fail(command, _missing(package))
    except BrokenPipeError:
        # The reader of a pipe went away (`diagkit ... | head`): nothing is wrong, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"diagkit {command.name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    foreign()  # somebody else's code: what it raises is neither ours to catch nor to word
    return code


def _cut(room: Room, words: list[str], command: str) -> tuple[list[str], list[str]]:
    """Our words, and those that a command passes on to another program (a room with ``cut`` knows where they begin)."""
    cut: Callable[[list[str]], tuple[list[str], list[str]]] | None = getattr(room, "cut", None)
    if cut is None:
        return words, []
    at = words.index(command) + 1
    own, rest = cut(words[at:])
    return words[:at] + own, rest


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="diagkit",
        description="Where do FSDP2 parameters live? What metadata says, where the bytes are, who drove them apart.",
        epilog="diagkit COMMAND --help says more. Errors leave with exit code 2, findings with 1.",
    )
    parser.add_argument("--version", action="version", version=f"diagkit {__version__}")
    rooms = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    return parser, {c.name: rooms.add_parser(c.name, help=c.help, description=_sentence(c.help)) for c in COMMANDS}


def _unknown(word: str) -> str:
    names = [c.name for c in COMMANDS]
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    return f"unknown command {word!r}; {hint}"


def _missing(package: str) -> MissingDependency:
    return MissingDependency(
        f"this command needs {package}",
        found=f"none in {sys.executable}",
        remedy=f"Install it: pip install {package.lower()}",
    )


def _fail(command: Command, error: DiagkitError) -> int:
    print(f"diagkit {command.name}: error: {error}", file=sys.stderr)
    return EXIT_ERROR


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
