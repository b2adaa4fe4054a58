"""Lists of changes: what one reading found, row by row, and what a moment tells."""

from __future__ import annotations

from collections.abc import Iterable

from diagkit.trace.schema import Change


def merge(changes: list[Change]) -> list[Change]:
    """Neighbouring rows with the same news as one change."""
    changes.sort(key=lambda change: change.start)
    out: list[Change] = []
    for change in changes:
        if out:
            last = out[-1]
            if last.start + last.count == change.start and (last.facts, last.exchanged) == (
                change.facts,
                change.exchanged,
            ):
                out[-1] = Change(last.start, last.count + change.count, last.facts, last.exchanged)
                continue
        out.append(change)
    return out


def exchanged_rows(readings: Iterable[Iterable[Change]]) -> set[int]:
    """Rows whose storage was exchanged in any of several readings."""
    return {
        row
        for changes in readings
        for change in changes
        if change.exchanged
        for row in range(change.start, change.start + change.count)
    }
