"""The demo's side of the warm process: start it, send cells, merge what their ranks tell.

Rules of this module: no torch here. A cell that hangs, dies or breaks is an outcome like any other and ends no run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from diagkit.demo.evidence import Evidence, evidence
from diagkit.demo.expected import FAILURES, Expectation, expected
from diagkit.demo.experiments import Experiment, checkpoint_folder, checkpoint_kind
from diagkit.demo.scenario import Life, Scenario, merged
from diagkit.diagnosis import diagnose
from diagkit.errors import EngineError, TraceError
from diagkit.trace import open_trace

__all__ = ["CellResult", "Launcher"]


@dataclass
class CellResult:
    """What one cell did on all its ranks, beside what it had to do."""

    experiment: Experiment
    ranks: int
    device: str
    simulated: bool
    records: list[dict[str, Any]]
    pids: list[int]
    seconds: float
    trace: str
    torch: tuple[int, int]
    evidence: Evidence | None
    """What rank 0's trace says; None where there is no trace to read."""
    findings: tuple[str, ...] = ()
    """Hazard codes that the diagnosis finds in the traces of all ranks."""

    @property
    def first(self) -> dict[str, Any]:
        """Rank 0's record."""
        return self.records[0]

    @property
    def moves(self) -> tuple[str, ...]:
        """Whole-model moves during the operation."""
        return () if self.evidence is None else self.evidence.moves

    @property
    def outcome(self) -> str:
        """``ok``, ``crash``, ``no answer`` (killed or out of time), ``broken``, or ``ranks disagree``."""
        outcomes = {record["outcome"] for record in self.records}
        return outcomes.pop() if len(outcomes) == 1 else "ranks disagree"

    @property
    def expectation(self) -> Expectation:
        """The row of the table of expected outcomes that speaks of this cell."""
        return expected(self.experiment)

    def differences(self) -> list[str]:
        """What is not as the running torch's semantics say; empty when all is."""
        want = self.expectation
        fails = want.shows(self.torch, self.ranks)
        if self.outcome != ("crash" if fails else "ok"):
            return [f"expected {'crash' if fails else 'ok'}, found {self.outcome}: {self.message or 'no message'}"]
        found = []
        if fails and FAILURES[want.failure or ""] not in self.message:
            found.append(f"expected the message {FAILURES[want.failure or '']!r}, found {self.message!r}")
        moves = " ".join(name.removeprefix("Module.") for name in self.moves)
        if moves != want.moves:
            found.append(f"expected the whole-model moves {want.moves or 'none'}, found {moves or 'none'}")
        if not fails and want.exported is not None and self.torch >= (2, 9):
            where = self.device if want.exported == "device" else want.exported
            if self.first["exported"] != where:
                found.append(f"expected exported tensors on {where}, found {self.first['exported']}")
        if any(record["values"] == "differ" for record in self.records):
            found.append("the values differ from those of the source")
        if fails and want.retry is not None:
            retry = (self.first["retry"] or {}).get("message", "")
            if FAILURES[want.retry] not in retry:
                found.append(f"expected the retry to say {FAILURES[want.retry]!r}, found {retry!r}")
        return found

    @property
    def message(self) -> str:
        """The exception's text on the first rank that has one."""
        for record in self.records:
            if record.get("exception"):
                return str(record["exception"]["message"])
        return ""

    def to_json(self) -> dict[str, Any]:
        """The cell for ``--json``: rank 0's facts, and per rank only what tells the ranks apart."""
        first = self.first
        want = self.expectation
        return {
            **asdict(self.experiment),
            "without": list(self.experiment.without),
            "ranks": self.ranks,
            "device": self.device,
            "simulated": self.simulated,
            "outcome": self.outcome,
            "expected": {"failure": want.failure, "exported": want.exported, "moves": want.moves},
            "differences": self.differences(),
            "exception": first.get("exception"),
            "retry": first.get("retry"),
            "exported": first.get("exported"),
            "values": first.get("values"),
            **({} if self.evidence is None else self.evidence.to_json()),
            "findings": list(self.findings),
            "pids": self.pids,
            "trace": self.trace,
            "seconds": self.seconds,
        }


class Launcher:
    """A warm process for one device; use it in a ``with`` statement.

    ``device`` is ``auto``, ``sim``, ``npu``, ``cuda`` or ``cpu`` until the process is up, and the device's type after.

    Raises:
        EngineError: the warm process did not come up; the message has its last line.
    """

    def __init__(self, out: Path, ranks: int = 2, device: str = "auto", timeout: float = 60.0) -> None:
        self.out = out
        self.ranks = ranks
        self.device = device
        self.simulated = False
        self.timeout = timeout
        self.torch = ""
        self._prepared: set[tuple[str, str, int]] = set()

    def __enter__(self) -> Launcher:
        self.out.mkdir(parents=True, exist_ok=True)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diagkit.demo.server", self.device, str(self.ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        ready = self._receive()
        if "error" in ready:
            self.__exit__(None, None, None)
            raise EngineError(ready["error"])
        self.device, self.simulated, self.torch = ready["device"], ready["simulated"], ready["torch"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what it was not asked any more before it ended
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def run(
        self, cells: Iterable[Experiment], progress: Callable[[Experiment], None] | None = None
    ) -> Iterator[CellResult]:
        """Run cells one after the other, each on its own fresh processes."""
        for cell in cells:
            if progress is not None:
                progress(cell)
            yield self.run_one(cell)

    def run_one(self, cell: Experiment, ranks: int | None = None) -> CellResult:
        """Run one cell, and before it, once per engine and flags, what writes the checkpoint that it loads.

        ``ranks`` may be fewer than the launcher's.
        """
        ranks = ranks or self.ranks
        if cell.operation == "load":
            self._prepare(cell, ranks)
        started = time.monotonic()
        answer = self._job("cell", cell.slug, cell.group, ranks, cell=asdict(cell))
        records = [
            record or {"outcome": "no answer", "exception": {"type": "", "message": _ended(status, self.timeout)}}
            for record, status in zip(answer["records"], answer["exits"], strict=True)
        ]
        major, minor = self.torch.split(".")[:2]
        return CellResult(
            experiment=cell,
            ranks=ranks,
            device=self.device,
            simulated=self.simulated,
            records=[{"exported": None, "values": None, "retry": None, **record} for record in records],
            pids=answer["pids"],
            seconds=round(time.monotonic() - started, 3),
            trace=str(self.folder(cell.slug)),
            torch=(int(major), int(minor)),
            **_evidence(self.folder(cell.slug), cell.operation),
        )

    def run_life(self, scenario: Scenario, name: str) -> Life:
        """Run a scenario; its trace goes to the folder that :meth:`folder` gives for this name, and is there to be read
        while it runs.

        Raises:
            EngineError: the warm process ended, or was stopped.
        """
        started = time.monotonic()
        writer = scenario.writer(self.device)
        if "load" in scenario.steps:
            self._prepare(writer, self.ranks)
        answer = self._job(
            "life",
            name,
            scenario.group(self.device),
            self.ranks,
            scenario=asdict(scenario),
            checkpoint=str(checkpoint_folder(self.out.resolve(), writer)),
        )
        return Life(
            scenario=scenario,
            ranks=self.ranks,
            device=self.device,
            simulated=self.simulated,
            torch=self.torch,
            steps=merged(scenario, answer["records"]),
            trace=str(self.folder(name)),
            seconds=round(time.monotonic() - started, 3),
        )

    def folder(self, name: str) -> Path:
        """Where the ranks of a job of this name leave their traces and logs."""
        return self.out / "cells" / name

    def stop(self) -> None:
        """End the warm process and every rank with it, from any thread; whoever waits for a result gets an error."""
        self._process.kill()

    def _prepare(self, cell: Experiment, ranks: int) -> None:
        key = (cell.engine, checkpoint_kind(cell.flags), ranks)
        if key in self._prepared:
            return
        # With a CPU backend, whatever the cell has: the FSDP engine cannot train without one.
        group = cell.group if "," in cell.group or self.device == "cpu" else f"cpu:gloo,{self.device}:{cell.group}"
        writer = Experiment(cell.engine, "current", "train", key[1], group)
        answer = self._job("preparation", f"prepare_{writer.slug}", group, ranks, cell=asdict(writer))
        failed = [record for record in answer["records"] if record is None or record["outcome"] != "ok"]
        if failed:
            told = (failed[0] or {}).get("exception", {}).get("message", "no answer")
            raise EngineError("the checkpoint to load could not be written", found=told, where=writer.name)
        self._prepared.add(key)

    def _job(self, task: str, slug: str, group: str, ranks: int, **what: Any) -> dict[str, Any]:
        job = {
            "task": task,
            "slug": slug,
            "group": group,
            "ranks": ranks,
            "out": str(self.out.resolve()),
            "timeout": self.timeout,
            **what,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer that is missing says so with its reason
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            raise EngineError(
                "the demo's warm process ended",
                found=lines[-1] if lines else f"exit status {self._process.returncode}",
                remedy="Run diagkit doctor",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _evidence(folder: Path, operation: str) -> dict[str, Any]:
    try:
        trace = open_trace(folder)
        seen = evidence(trace[0], operation)
    except TraceError:
        return {"evidence": None}
    return {"evidence": seen, "findings": tuple(sorted({finding.code for finding in diagnose(trace)}))}


def _ended(status: int, timeout: float) -> str:
    # Killed when the time was up, or done by itself in the moment before: late either way.
    return f"no answer within {timeout:g} s" if status in (-9, 0) else f"the process ended with status {status}"
