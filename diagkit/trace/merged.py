"""A run's ranks, read together.

The last methods of `Trace` are doors for users to rooms above this one; they import at call, so that reading a
trace needs nothing but the standard library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagkit.errors import TraceError
from diagkit.trace.reader import RankTrace, TableCache, read_file
from diagkit.trace.schema import Header, Moment

if TYPE_CHECKING:
    import pandas

_RANK_FILE = re.compile(r"rank-(\d{1,9})\.jsonl")


class Trace:
    """What one run recorded: ``trace[rank]`` is a rank's part, ``trace.problems`` what is missing or damaged."""

    def __init__(self, ranks: dict[int, RankTrace], path: Path | None = None, problems: tuple[str, ...] = ()) -> None:
        self.path = path
        self.ranks = dict(sorted(ranks.items()))
        self._problems = problems

    @property
    def header(self) -> Header:
        """The header of the lowest rank that is there."""
        return next(iter(self.ranks.values())).header

    @property
    def world_size(self) -> int:
        return max(rank.header.world_size for rank in self.ranks.values())

    @property
    def simulated(self) -> bool:
        return any(rank.header.simulated for rank in self.ranks.values())

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world that left no file."""
        return [rank for rank in range(min(self.world_size, 1 << 20)) if rank not in self.ranks]

    @property
    def problems(self) -> list[str]:
        """What could not be read, rank by rank; empty for a whole trace."""
        found = list(self._problems)
        if missing := self.missing_ranks:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            found.append(f"no trace of {len(missing)} of {self.world_size} ranks: {shown}")
        for number, rank in self.ranks.items():
            found += [f"rank {number}: {problem}" for problem in rank.problems]
        return found

    @property
    def first_failure(self) -> tuple[RankTrace, Moment] | None:
        """The failure that came first: in the earliest phase, there by wall clock, then by rank."""
        found = [(m.phase, m.time, number, rank, m) for number, rank in self.ranks.items() for m in rank.failures[:1]]
        if not found:
            return None
        *_, rank, moment = min(found, key=lambda entry: entry[:3])
        return rank, moment

    def __getitem__(self, rank: int) -> RankTrace:
        try:
            return self.ranks[rank]
        except KeyError:
            have = ", ".join(map(str, list(self.ranks)[:16]))
            raise TraceError(
                "no such rank in this trace", found=rank, expected=f"one of {have}", where=self.path
            ) from None

    def __iter__(self) -> Iterator[RankTrace]:
        return iter(self.ranks.values())

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        header = self.header
        device = f"{'simulated ' if self.simulated else ''}{header.device}"
        moments = sum(len(rank.moments) for rank in self)
        failures = sum(len(rank.failures) for rank in self)
        rows = max(len(rank.rows) for rank in self)
        counts = f"{rows} rows, {moments} moments, {failures} failures"
        return f"<Trace {header.run or '?'}: {len(self)} of {self.world_size} ranks, {device}, {counts}>"

    def _repr_html_(self) -> str:
        from diagkit.views.html import trace_html

        return trace_html(self)

    def frame(self, every: bool = False) -> pandas.DataFrame:
        """A pandas table: a line per changed row, moment and rank; ``every``: per existing row, moment and rank."""
        from diagkit.trace.frames import frame

        return frame(self, every=every)

    def findings(self) -> Any:
        """What `diagkit.diagnosis` finds in this trace."""
        from diagkit.diagnosis import diagnose

        return diagnose(self)


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace in a folder of ``rank-*.jsonl`` files, or in one such file.

    Raises:
        TraceError: nothing there is a trace.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        # A link could lead anywhere, and traces come from strangers.
        files = sorted(
            f for f in place.iterdir() if _RANK_FILE.fullmatch(f.name) and f.is_file() and not f.is_symlink()
        )
    else:
        raise TraceError("no such file or folder", where=place, remedy="Name the folder that was given as out=")
    cache = TableCache()
    runs: dict[str, dict[int, RankTrace]] = {}
    problems: list[str] = []
    for file in files:
        try:
            trace = read_file(file, cache)
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
            continue
        if not trace.rows and not trace.moments and not trace.header.run:
            problems.append(f"{file.name}: holds no trace")
            continue
        ranks = runs.setdefault(trace.header.run, {})
        if trace.rank in ranks:
            problems.append(f"{file.name}: rank {trace.rank} is there twice; left out")
            continue
        ranks[trace.rank] = trace
    if not runs:
        raise TraceError(
            "no trace here",
            found="; ".join(problems) or f"{len(files)} files named rank-*.jsonl",
            where=place,
            remedy="Name the folder that was given as out=",
        )
    # Files of an older run in the same folder are another story; the run with most ranks, then the latest, is told.
    run = max(
        runs,
        key=lambda name: (
            len(runs[name]),
            max((r.moments[0].time for r in runs[name].values() if r.moments), default=0.0),
        ),
    )
    if len(runs) > 1:
        problems.append(f"files of {len(runs) - 1} other run(s) in the folder are left out")
    return Trace(runs[run], place, tuple(problems))
