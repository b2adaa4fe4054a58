"""A run's ranks, read together.

The last methods of `Trace` are doors for users to rooms above this one; they import at call, so that reading a
trace needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagkit.errors import TraceError, UsageError
from diagkit.language import msg, tr
from diagkit.trace.reader import RankTrace, TableCache, read_file
from diagkit.trace.schema import Header, Moment
from diagkit.trace.spans import in_spans, parse_spans
from diagkit.trace.values import clip, printable

if TYPE_CHECKING:
    import pandas

    from diagkit.trace.compare import Comparison

#: Called now and then with how many ranks are read, and how many there are.
Progress = Callable[[int, int], None]

#: No world is larger; what a header claims beyond that is not counted out rank by rank.
WORLD_LIMIT = 1 << 17
_RANK_FILE = re.compile(r"rank-([0-9]{1,9})\.jsonl")


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
        """Ranks of the world that left no file, though nobody left them out."""
        left_out = self.left_out
        return [r for r in range(min(self.world_size, WORLD_LIMIT)) if r not in self.ranks and r not in left_out]

    @property
    def left_out(self) -> list[int]:
        """Ranks that the user chose not to record."""
        try:
            recorded = parse_spans(str(self.header.job["diagkit.ranks"]))
        except (KeyError, ValueError):
            return []
        world = range(min(self.world_size, WORLD_LIMIT))
        return [rank for rank in world if rank not in self.ranks and not in_spans(rank, recorded)]

    @property
    def problems(self) -> list[str]:
        """What could not be read, rank by rank; empty for a whole trace."""
        found = list(self._problems)
        if missing := self.missing_ranks:
            text = msg("no trace of {missing} of {count} ranks: {ranks}")
            found.append(tr(text, missing=len(missing), count=self.world_size, ranks=_few(missing)))
        if left_out := self.left_out:
            chosen = self.header.job["diagkit.ranks"]
            text = msg("left out, because only ranks {chosen} were to be recorded: {ranks}")
            found.append(tr(text, chosen=chosen, ranks=_few(left_out)))
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
        counts = f"{rows} rows, {moments} moments, {failures} failure{'s' * (failures != 1)}"
        return f"<Trace {header.run or '?'}: {len(self)} of {self.world_size} ranks, {device}, {counts}>"

    def __str__(self) -> str:
        """What moved, when, and whose line moved it, on the lowest rank; what failed; in about a dozen lines."""
        from diagkit.trace.summary import summary

        first = next(iter(self))
        head = f"rank {first.rank}:" if len(self) > 1 else ""
        lines = [repr(self), *([head] if head else []), *(f"  {line}" for line in summary(first))]
        return "\n".join([*lines, *(f"missing: {printable(problem)}" for problem in self.problems[:3])])

    def _repr_html_(self) -> str:
        from diagkit.views.html import trace_html

        return trace_html(self)

    def frame(self, every: bool = False) -> pandas.DataFrame:
        """A pandas table: a line per changed row, moment and rank; ``every``: per existing row, moment and rank."""
        from diagkit.trace.frames import frame

        return frame(self, every=every)

    def redacted(self, names: bool = False) -> Trace:
        """A copy without hosts, users, paths, addresses and secrets; ``names``: without parameter names, too."""
        from diagkit.trace.redact import redacted

        return redacted(self, names)

    def compare(self, other: Trace) -> Comparison:
        """Where this run (A) and the other (B) part first."""
        from diagkit.trace.compare import compare

        return compare(self, other)

    def findings(self) -> Any:
        """What `diagkit.diagnosis` finds in this trace."""
        from diagkit.diagnosis import diagnose

        return diagnose(self)

    def explore(self, other: Trace | None = None) -> Any:
        """Look through this run, or two side by side: `diagkit.explore`."""
        from diagkit.views import explore

        return explore(self, other)

    def report(self, path: str | os.PathLike[str], *, lang: str = "en", against: Trace | None = None) -> Path:
        """Write this run's story to one file, ``.html``, ``.md`` or ``.json`` by its name, and return where it is.

        ``lang`` is "en" or "zh"; ``against`` a later run: then the report says whether a fix held.
        """
        from diagkit.views.report import write

        return write(self, path, lang=lang, against=against)


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def open_trace(path: str | os.PathLike[str], progress: Progress | None = None) -> Trace:
    """The trace in a folder of ``rank-*.jsonl`` files, or in one such file; of a folder of runs, the latest run.

    ``progress`` is told after each rank how many are read, and of how many.

    Raises:
        UsageError: that is no path.
        TraceError: nothing there is a trace.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise UsageError(
            "no path of a trace",
            found=type(path).__name__,
            expected="a folder of rank-*.jsonl files",
            remedy="Name the folder that was given as out=",
        )
    place = Path(path)
    try:
        files, problems = _rank_files(place)
        if not files and place.is_dir() and (runs := _runs(place)):
            place = runs[-1]
            files, problems = _rank_files(place)
            if len(runs) > 1:
                problems.append(f"{len(runs)} runs in this folder; the latest is read: {place.name}")
    except (OSError, ValueError) as error:  # too long a name, no permission; a NUL in it is a ValueError
        raise TraceError(
            "cannot look there",
            found=getattr(error, "strerror", None) or str(error),
            where=clip(str(place)),
            remedy="Name the folder that was given as out=",
        ) from None
    cache = TableCache()
    found: list[RankTrace] = []
    for done, file in enumerate(files, 1):
        try:
            trace = read_file(file, cache)
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
            continue
        finally:
            if progress is not None:
                progress(done, len(files))
        if trace.rank >= trace.header.world_size:
            problems.append(f"{file.name}: says that it is rank {trace.rank} of {trace.header.world_size}; left out")
            continue
        if not trace.rows and not trace.moments and not trace.header.run:
            problems.append(f"{file.name}: holds no trace")
            continue
        found.append(trace)
    if not found:
        raise TraceError(
            "no trace here",
            found="; ".join(problems[:8]) or "no file named rank-*.jsonl",
            where=place,
            remedy="Name the folder that was given as out=",
        )
    return Trace(_one_run(found, problems), place, tuple(problems))


def _runs(place: Path) -> list[Path]:
    """The folders in a folder that hold traces, in the order in which they were begun."""
    found = []
    for folder in place.iterdir():
        with contextlib.suppress(OSError):
            if (
                folder.is_dir()
                and not folder.is_symlink()
                and any(_RANK_FILE.fullmatch(f.name) for f in folder.iterdir())
            ):
                found.append((folder.stat().st_mtime, folder.name, folder))
    return [folder for *_, folder in sorted(found)]


def _rank_files(place: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and what was passed over."""
    if place.is_file():
        return [place], []
    if not place.is_dir():
        raise TraceError(
            "neither a file nor a folder" if place.exists() else "no such file or folder",
            where=clip(str(place)),
            remedy="Name the folder that was given as out=",
        )
    files: list[Path] = []
    problems: list[str] = []
    try:
        named = sorted(f for f in place.iterdir() if _RANK_FILE.fullmatch(f.name))
    except OSError as error:
        raise TraceError("cannot read this folder", found=error.strerror or error, where=place) from error
    for file in named:
        if file.is_symlink():  # it could lead anywhere, and traces come from strangers
            problems.append(f"{file.name}: a link, not followed")
        elif not file.is_file():
            problems.append(f"{file.name}: no regular file")
        else:
            files.append(file)
    return files, problems


def _one_run(found: list[RankTrace], problems: list[str]) -> dict[int, RankTrace]:
    """The ranks of one run: files of an older run in the same folder are another story, the latest is told."""
    runs: dict[tuple[str, int], dict[int, RankTrace]] = {}
    headless: list[RankTrace] = []
    for trace in found:
        name = trace.path.name if trace.path else "?"
        if trace.headless:
            headless.append(trace)
            continue
        ranks = runs.setdefault((trace.header.run, trace.header.world_size), {})
        if trace.rank in ranks:
            problems.append(f"{name}: rank {trace.rank} is there twice; left out")
            continue
        ranks[trace.rank] = trace
    chosen = max(runs.values(), key=lambda ranks: (_began(ranks), len(ranks))) if runs else {}
    if len(runs) > 1:
        problems.append(f"files of {len(runs) - 1} other run(s) in the folder are left out")
    for trace in headless:  # nobody can say of which run it is; the name of its file says which rank
        if trace.rank in chosen:
            problems.append(f"{trace.path.name if trace.path else '?'}: rank {trace.rank} is there twice; left out")
        else:
            chosen[trace.rank] = trace
    return chosen


def _began(ranks: dict[int, RankTrace]) -> float:
    return max((rank.moments[0].time for rank in ranks.values() if rank.moments), default=0.0)
