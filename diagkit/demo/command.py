"""``diagkit demo``: both engines, guarded and unguarded, on this machine, compared with what torch's semantics say.

Exit code 0 when every cell does what the table of expected outcomes says for the running torch, 1 with the differences
otherwise, 2 when the request makes no sense.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from diagkit.demo.experiments import ENGINES, OPERATIONS, REVISIONS, Experiment, group_names, matrix, story
from diagkit.demo.launch import CellResult, Launcher
from diagkit.demo.tables import device_line, matrix_table, story_text
from diagkit.errors import UsageError

__all__ = ["DEVICES", "add_arguments", "main"]

DEVICES: tuple[str, ...] = ("auto", "sim", "npu", "cuda")
MAX_RANKS = 8  # the simulated accelerator's devices, and a node's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options. Values are checked in :func:`main`, where the message can name the remedy."""
    parser.add_argument("--ranks", metavar="N", default="2", help=f"processes per cell, 1 to {MAX_RANKS} (default 2)")
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, sim, npu or cuda (auto: a real one with enough devices, else sim)",
    )
    parser.add_argument("--engine", action="append", help=f"only this one of {', '.join(ENGINES)}; repeatable")
    parser.add_argument("--revision", action="append", help=f"only this one of {', '.join(REVISIONS)}; repeatable")
    parser.add_argument("--operation", action="append", help=f"only this one of {', '.join(OPERATIONS)}; repeatable")
    parser.add_argument("--group", action="append", help="only this one of cpu:gloo,npu:hccl and hccl; repeatable")
    parser.add_argument("--history", action="store_true", help="every revision of the fix, not only before and current")
    parser.add_argument(
        "--control", action="store_true", help="also the engines without the policy, and the to() that nothing guards"
    )
    parser.add_argument("--short", action="store_true", help="only the bug report: FSDP engine's save, two revisions")
    parser.add_argument("--timeout", metavar="S", default="60", help="seconds that one cell may take (default 60)")
    parser.add_argument("--out", metavar="DIR", help="where traces and logs go (default: a new temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output instead of tables")


def main(args: argparse.Namespace) -> int:
    """Run the demo and tell the outcome; see the module's docstring for the exit codes.

    Raises:
        UsageError: an option's value makes no sense.
        EngineError: the ranks could not be started.
    """
    ranks = _whole_number("--ranks", args.ranks, 1, MAX_RANKS)
    timeout = _whole_number("--timeout", args.timeout, 1, 3600)
    engines = _chosen("engine", args.engine, ENGINES)
    revisions = _chosen("revision", args.revision, REVISIONS) if args.revision else None
    operations = _chosen("operation", args.operation, tuple(OPERATIONS))
    (device,) = _chosen("device", [args.device], DEVICES)
    known_groups = [name for kind in ("npu", "cuda") for name in group_names(kind)]
    groups = _chosen("process group", args.group, known_groups) if args.group else None
    out = _folder(args.out)
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    started = time.monotonic()
    _progress(f"diagkit demo: loading torch{'' if device in ('npu', 'cuda') else ' and the simulated accelerator'} ...")
    with Launcher(out, ranks, device, float(timeout)) as launcher:
        here = group_names(launcher.device)
        wrong = [group for group in groups or () if group not in here]
        if wrong:
            raise UsageError(
                "process group of another device",
                found=wrong[0],
                remedy=f"On {launcher.device} choose {' or '.join(here)}",
            )
        tale = [] if _narrowed(args) else story(here[0])
        table = matrix(
            engines,
            revisions or (REVISIONS if args.history else ("before", "current")),
            groups or here,
            args.control or args.operation is not None,
            operations,
        )
        cells = tale if args.short else [*tale, *(cell for cell in table if cell not in tale)]
        results = _run(launcher, cells)
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps(_document(launcher, results, seconds), indent=1))
    else:
        print(_text(launcher, results, table, len(tale), args.short, seconds))
    return 1 if any(result.differences() for result in results) else 0


def _narrowed(args: argparse.Namespace) -> bool:
    return bool(args.engine or args.revision or args.operation or args.group) and not args.short


def _run(launcher: Launcher, cells: Sequence[Experiment]) -> list[CellResult]:
    results: list[CellResult] = []

    def tell(cell: Experiment) -> None:
        _progress(f"[{len(results) + 1}/{len(cells)}] {cell.name}")

    for result in launcher.run(cells, tell):
        results.append(result)
    _progress("")
    return results


def _progress(text: str) -> None:
    """One line that is rewritten on a terminal; a line each in a log, the empty ones left out."""
    if sys.stderr.isatty():
        width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
        print(f"\r{text[:width]:<{width}}" if text else f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _text(
    launcher: Launcher,
    results: Sequence[CellResult],
    table: Sequence[Experiment],
    chapters: int,
    short: bool,
    seconds: float,
) -> str:
    parts = [device_line(launcher.device, launcher.simulated, launcher.ranks, launcher.torch)]
    if chapters:
        parts.append(story_text(results[:chapters]))
    if not short:
        by_cell = {result.experiment: result for result in results}
        parts.append(matrix_table(by_cell[cell] for cell in table))
    different = [(result, line) for result in results for line in result.differences()]
    told = [f"{result.experiment.name}: {line} (log: {result.trace})" for result, line in different]
    if told:
        parts.append("NOT as expected:\n" + "\n".join(told))
    else:
        parts.append(f"All {len(results)} cells did what torch {launcher.torch} must do, in {seconds:.0f} s.")
    parts.append(f"Traces and logs: {launcher.out}")
    crash = next((result for result in results if result.outcome == "crash" and result.findings), None)
    if crash is not None:
        parts[-1] += f"\nLook closer: diagkit diagnose '{crash.trace}'"
    return "\n\n".join(parts)


def _document(launcher: Launcher, results: Sequence[CellResult], seconds: float) -> dict[str, object]:
    return {
        "schema": 1,
        "torch": launcher.torch,
        "device": launcher.device,
        "simulated": launcher.simulated,
        "ranks": launcher.ranks,
        "out": str(launcher.out),
        "seconds": round(seconds, 1),
        "as_expected": not any(result.differences() for result in results),
        "cells": [result.to_json() for result in results],
    }


def _whole_number(option: str, text: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise UsageError(f"{option} makes no sense", found=text, expected=f"a whole number from {low} to {high}")
    return number


def _chosen(what: str, values: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    for value in values or ():
        if value not in known:
            raise UsageError(f"unknown {what}", found=value, remedy=f"Choose one of {' '.join(known)}")
    return tuple(values) if values else tuple(known)


def _folder(name: str | None) -> Path:
    if name is None:
        return Path(tempfile.mkdtemp(prefix="diagkit-demo-"))
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            "cannot write to the folder of --out", found=error.strerror, where=str(folder), remedy="Name another folder"
        ) from None
