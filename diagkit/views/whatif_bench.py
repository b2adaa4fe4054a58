"""The what-if laboratory without its widgets: what is chosen, foretold, bet, running and found.

Rules of this module: no widget here; runs are real ones, on ranks in the background, and a figure shows nothing else. A
bet is placed before the run and is not changed by it. Whoever shows this state asks to be told of changes, and is told
from the thread in which they happen.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagkit.demo.launch import Launcher
from diagkit.demo.scenario import Life, Scenario
from diagkit.errors import DiagkitError, UsageError
from diagkit.trace import open_trace
from diagkit.views.figure import ViewFigure
from diagkit.views.maps import residency_map
from diagkit.views.matrix import Outcome, outcome_matrix

if TYPE_CHECKING:
    from diagkit.demo.forecast import Forecast

__all__ = ["MAX_RANKS", "NOTHING", "Bench", "Run"]

MAX_RANKS = 4
NOTHING = "nothing"
"""The bet that no step fails."""


@dataclass(frozen=True)
class Run:
    """One run: what was foretold and bet, and what came of it."""

    number: int
    life: Life
    forecast: tuple[Forecast, ...]
    bet: str | None

    @property
    def surprises(self) -> tuple[str, ...]:
        """The steps that did not go as foretold."""
        pairs = zip(self.forecast, self.life.steps, strict=True)
        return tuple(found.name for told, found in pairs if told.outcome not in (found.outcome, "unknown"))

    @property
    def won(self) -> bool | None:
        """Whether the bet came true; None where none was placed."""
        return None if self.bet is None else self.bet == (self.life.first_failure or NOTHING)

    @property
    def verdict(self) -> str:
        """``save fails, as foretold. Your bet, that nothing fails, is lost.``"""
        failed = self.life.first_failure
        told = f"{failed} fails first" if failed else "Nothing fails"
        surprises = ", ".join(self.surprises)
        words = [f"{told}. Not as foretold: {surprises}." if surprises else f"{told}, as foretold."]
        if self.bet is not None:
            bet = "that nothing fails" if self.bet == NOTHING else f"that {self.bet} fails first"
            words.append(f"Your bet, {bet}, is {'won' if self.won else 'lost'}.")
        return " ".join(words)

    def outcomes(self) -> list[Outcome]:
        """The steps as a row of an outcome matrix."""
        scenario, surprises = self.life.scenario, self.surprises
        settings = f", {scenario.settings}" if scenario.settings else ""
        return [
            Outcome(
                scenario.group(self.life.device),
                scenario.engine,
                f"run {self.number}: {scenario.revision}{settings}",
                step.name,
                step.outcome,
                step.message,
                f"on {step.exported}" if step.exported else "",
                step.name in surprises,
            )
            for step in self.life.steps
        ]


class Bench:
    """One laboratory. Close it, or use it in a ``with`` statement: it keeps a warm process for its runs.

    ``device`` is ``auto``, ``sim``, ``npu`` or ``cuda``; traces go to ``out``, by default a temporary folder.
    """

    def __init__(
        self, scenario: Scenario | None = None, ranks: int = 2, device: str = "auto", out: str | Path | None = None
    ) -> None:
        self.scenario = scenario or Scenario()
        self.ranks = ranks
        self.bet: str | None = None
        self.runs: list[Run] = []
        self.problem = ""
        """Why the last run came to nothing; empty where it did not."""
        self._device = device
        self._out = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="diagkit-"))
        self._launcher: Launcher | None = None
        # One thread for the bench's whole life: on Linux the warm process ends with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagkit-whatif")
        self._job: Future[None] | None = None
        self._busy = False
        self._cancelled = threading.Event()
        self._listeners: list[Callable[[], None]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what is chosen

    def choose(self, ranks: int | None = None, **changes: Any) -> None:
        """Change the number of ranks, or any field of the scenario; a bet on what was chosen before is taken back.

        Raises:
            UsageError: a value that no engine knows, or a run is under way.
        """
        self._refuse_while_running("change anything")
        if ranks is not None and not 1 <= ranks <= MAX_RANKS:
            raise UsageError("so many ranks are not for a laboratory", found=ranks, expected=f"1 to {MAX_RANKS}")
        self.scenario = replace(self.scenario, **changes)
        self.ranks = ranks or self.ranks
        self.bet = None
        self._tell()

    @property
    def forecast(self) -> tuple[Forecast, ...]:
        """What each step will do, from the engines' guards and the measured tables."""
        from diagkit.demo.forecast import forecast  # loads torch

        return forecast(self.scenario, self.ranks)

    def place(self, bet: str | None) -> None:
        """Bet on the step that fails first, by its name, or on :data:`NOTHING`; None takes the bet back.

        Raises:
            UsageError: no such step, or a run is under way.
        """
        self._refuse_while_running("bet")
        names = (*self.scenario.names, NOTHING)
        if bet is not None and bet not in names:
            raise UsageError("nobody can bet on that", found=bet, expected=f"one of {', '.join(names)}")
        self.bet = bet
        self._tell()

    # ---- runs

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._busy

    @property
    def progress(self) -> tuple[str, ...]:
        """The steps that the run under way has begun, read from the trace that it is writing."""
        if not self.running:
            return ()
        try:
            phases = open_trace(self._folder)[0].phases.values()
        except DiagkitError:
            return ()
        return tuple(phase.name for phase in phases if phase.name)

    def start(self) -> None:
        """Begin a run in the background.

        Raises:
            UsageError: one is under way already.
        """
        self._refuse_while_running("run")
        told = self.forecast  # before anything runs
        self._cancelled.clear()
        self.problem = ""
        self._busy = True
        self._job = self._thread.submit(self._work, told)
        self._tell()

    def wait(self) -> None:
        """Until no run is under way."""
        if self._job is not None:
            self._job.result()

    def run(self, scenario: Scenario | None = None) -> Run:
        """Start a run, of this scenario or of what is chosen, and wait for it.

        Raises:
            UsageError: it came to nothing; the message says why.
        """
        if scenario is not None:
            self.choose(**vars(scenario))
        self.start()
        self.wait()
        if self.problem:
            raise UsageError("the run came to nothing", found=self.problem)
        return self.runs[-1]

    def cancel(self) -> None:
        """End the run under way, and its ranks with it; without one, nothing.

        A warm process that is just starting is let come up first.
        """
        self._cancelled.set()
        if self.running and self._launcher is not None:
            self._launcher.stop()

    def close(self) -> None:
        """Cancel what runs, and end the warm process."""
        self.cancel()
        self._thread.submit(self._dismiss)
        self._thread.shutdown()

    def _work(self, told: tuple[Forecast, ...]) -> None:
        try:
            launcher = self._warm()
            if self._cancelled.is_set():
                return
            life = launcher.run_life(self.scenario, self._folder.name)
            self.runs.append(Run(len(self.runs) + 1, life, told, self.bet))
        except DiagkitError as error:
            self.problem = str(error)
        finally:
            if self._cancelled.is_set():
                self.problem = "cancelled"
            if self.problem:
                self._dismiss()
            self._busy = False
            self._tell()

    def _warm(self) -> Launcher:
        if self._launcher is None or self._launcher.ranks != self.ranks:
            self._dismiss()
            self._launcher = Launcher(self._out, self.ranks, self._device).__enter__()
        return self._launcher

    def _dismiss(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.__exit__(None, None, None)

    @property
    def _folder(self) -> Path:
        return self._out / "cells" / f"run-{len(self.runs) + 1}"

    def _refuse_while_running(self, what: str) -> None:
        if self.running:
            raise UsageError(f"cannot {what} while a run is under way", remedy="Wait for it, or cancel it")

    # ---- what is shown

    def watch(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after every change, from whichever thread made it."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def matrix(self) -> ViewFigure:
        """Every run so far as a row, every step as a column.

        Raises:
            UsageError: nothing has run.
        """
        last = self._last()
        life = last.life
        device = f"simulated {life.device}" if life.simulated else life.device
        around = f"{life.ranks} rank{'s' if life.ranks > 1 else ''} · {device} · torch {life.torch}"
        cells = [cell for run in self.runs for cell in run.outcomes()]
        return outcome_matrix(cells, title=f"Run {last.number}: {last.verdict}", around=around)

    def map(self) -> ViewFigure:
        """Where every tensor of the last run was, moment by moment.

        Raises:
            UsageError: nothing has run.
        """
        return residency_map(self._last().life.trace)

    def _last(self) -> Run:
        if not self.runs:
            raise UsageError("nothing has run yet", remedy="Call run() first")
        return self.runs[-1]
