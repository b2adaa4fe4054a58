"""What a failed job's stderr says last: which hazard it was, which line did it, and where the trace is.

One rank explains in full, the others in a line: the first to fail, known by a file that only one can make.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagkit.diagnosis.finding import Finding
    from diagkit.run.watch import Watch

#: A larger trace is not read again in a process that is about to end.
_READ_AGAIN = 64 << 20
#: Made by the rank that explains in full.
FIRST = "first-failure"


def hard_coded(error: BaseException) -> str:
    """What to say of a script that names another device than the simulated one; "" where that is not what happened."""
    from diagkit.lab import running

    simulation = running()
    message = "" if simulation is None else " ".join(str(one) for one in _chain(error))
    if simulation is None or not re.search(r"\b(cuda|nccl|nvidia)", message, re.IGNORECASE):
        return ""
    return (
        f"diagkit: this script names cuda or nccl itself, and the simulated accelerator is {simulation.name!r} with "
        f"{simulation.backend!r}. Take the device from torch.accelerator.current_accelerator() and leave the backend "
        "to init_process_group(), or run without --simulate\n"
    )


def well(error: BaseException) -> bool:
    """Whether an exception is no failure: the user's interrupt, or an exit with code 0."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (None, 0))


def failure_text(watch: Watch | None, error: BaseException, fault: str = "") -> str:
    """The lines to print after an exception's traceback; ``fault`` is why nothing was recorded. Never raises."""
    recorder = None if watch is None else watch.recorder
    if recorder is None or recorder.path is None:
        # An exit code alone is no crash, and a script that never met FSDP2 has nothing to explain.
        if fault:
            return f"diagkit: nothing was recorded: {fault}\n"
        said = "diagkit: no FSDP2 model was seen in this process, so there is no trace\n"
        return "" if isinstance(error, SystemExit) else said
    path = recorder.path
    try:
        from diagkit.capture.failures import failure_of
        from diagkit.diagnosis.stopped import told

        if not isinstance(error, SystemExit):
            recorder.failed_outside(error)
        finding = _finding(path, error)
        full = _first(path)
        rank, simulated = _who(path)
        head = f"diagkit: rank {rank}: "
        if finding is None and isinstance(error, SystemExit):
            text = ""
        elif finding is None:
            guarded = told(failure_of(error, ""))
            text = f"{head}{guarded[1] if guarded else f'{type(error).__name__}: no residency hazard explains it'}\n"
        elif full:
            text = head + "\n".join(_lines(finding)) + "\n"
        else:
            cause = f", {finding.cause.frame}" if finding.cause and finding.cause.frame else ""
            text = f"{head}{finding.code} {finding.title}{cause}\n"
        return text + f"diagkit: trace: {path}{' (simulated accelerator)' if simulated else ''}\n"
    except Exception as fault:
        return f"diagkit: cannot explain this ({type(fault).__name__}: {fault}); trace: {path}\n"


def end_text(watch: Watch | None) -> str:
    """The line for a job that ended well; "" where nothing was recorded, and on all ranks but the first."""
    recorder = None if watch is None else watch.recorder
    if recorder is None or recorder.path is None:
        return ""
    with contextlib.suppress(Exception):
        rank, simulated = _who(recorder.path)
        if rank == 0:
            return f"diagkit: trace: {recorder.path.parent}{' (simulated accelerator)' if simulated else ''}\n"
    return ""


def spawned_text(folder: Path, failed: bool) -> str:
    """The same for a job whose ranks were processes that it started itself: their trace tells."""
    try:
        from diagkit.diagnosis import diagnose
        from diagkit.trace import open_trace

        trace = open_trace(folder)
        finding = next((f for f in diagnose(trace) if f.failure), None) if failed else None
        text = "" if finding is None else "diagkit: " + "\n".join(_lines(finding)) + "\n"
        return text + f"diagkit: trace: {folder}{' (simulated accelerator)' if trace.simulated else ''}\n"
    except Exception as fault:
        return f"diagkit: cannot explain this ({type(fault).__name__}: {fault}); trace: {folder}\n"


def say(text: str) -> None:
    """Writes to stderr, if it still takes anything."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _who(path: Path) -> tuple[int, bool]:
    from diagkit.trace.reader import read_rank

    with path.open("rb") as file:
        header = read_rank(file.readline() for _ in range(1)).header
    return header.rank, header.simulated


def _first(path: Path) -> bool:
    try:
        os.close(os.open(path.parent / FIRST, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _finding(path: Path, error: BaseException) -> Finding | None:
    """The finding that explains the exception: by the trace, which knows the cause, else by the live model."""
    if path.stat().st_size <= _READ_AGAIN:
        from diagkit.diagnosis import diagnose
        from diagkit.trace.reader import read_file

        found = diagnose(read_file(path))
        # A script that met the exception itself and leaves with a code of its own: the trace has seen it pass.
        exits = isinstance(error, SystemExit)
        explaining = [f for f in found if f.failure and (exits or _about(f, error))]
        if explaining or exits:
            return max(explaining, key=lambda f: (not f.follows, f.cause is not None), default=None)
    from diagkit.live import explain

    return next(iter(explain(error).findings), None)


def _about(finding: Finding, error: BaseException) -> bool:
    kind, _, message = finding.failure.partition(": ")
    with contextlib.suppress(Exception):
        return any(
            kind == type(one).__name__ and " ".join(str(one).split()).startswith(" ".join(message.split())[:200])
            for one in _chain(error)
        )
    return False


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found and len(found) < 20:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _lines(finding: Finding) -> list[str]:
    """A finding in a few lines: a log is read by scrolling."""
    lines: list[str] = [f"{finding.code} {finding.title}"]
    where = ", ".join(finding.where[:3]) + (" ..." if len(finding.where) > 3 else "")
    lines.append(f"  {where}: {finding.residency}" if finding.residency else f"  {where}")
    if finding.cause is not None:
        lines.append(f"  moved by {finding.cause}")
        frame: Any = finding.cause.frame
        if frame is not None and frame.code:
            lines.append(f"    {frame.file}:{frame.line}: {frame.code}")
    lines.append(f"  remedy: {finding.remedy}")
    return lines
