"""What was read and is not told yet, and the telling of it: moments, and faults of our own."""

from __future__ import annotations

from typing import Any

from diagkit.capture.changes import exchanged_rows
from diagkit.capture.inventory import Inventory
from diagkit.capture.phases import Phases
from diagkit.trace.schema import FAILURE, GROUP, MARK, Change, Row
from diagkit.trace.writer import TraceWriter

#: Faults of our own that are told, each once.
TROUBLES = 20


class Ledger:
    """Stands between an inventory and a trace. The recorder serialises."""

    def __init__(self, writer: TraceWriter, wants: Any, phases: Phases) -> None:
        self.writer = writer
        self.inventory = Inventory(self._define, writer.fact_id, wants)
        self._phases = phases
        self._unwritten: list[list[Change]] = []  # read, and not yet in the trace
        self._troubles: set[tuple[str, str]] = set()

    def _define(self, rows: list[Row], local_shapes: list[tuple[int, ...] | None]) -> None:
        self.writer.table(rows, local_shapes, self._phases.current.ordinal)

    def read(
        self, kinds: frozenset[str], stepped: bool = False, afresh: bool = False, edge: bool = False
    ) -> list[Change]:
        """Reads all of these kinds; what changed, which the next moment tells. ``stepped``: after an optimizer's step,
        which changes no residency but by the states that it makes the first time, and leaves gathered groups stale."""
        if self.inventory.dirty:
            self.inventory.look_again()
        if stepped:
            stale = self.inventory.gathered.stepped()
            if not stale and not self.inventory.new_states():
                return []
            kinds |= {GROUP}
        if not kinds:
            return []
        try:
            changes = self.inventory.scan(kinds, afresh, edge)
        except BaseException:
            self.writer.ask_key()  # what was read before is told with the next whole state
            raise
        self.take(changes)
        faults, self.inventory.readings.faults = self.inventory.readings.faults, []
        for fault in faults:
            self.trouble("inventory", RuntimeError(fault))
        return changes

    def take(self, changes: list[Change]) -> None:
        """Keeps changes for the next moment."""
        if changes:
            self._unwritten.append(changes)

    def moment(self, kind: str, label: str, kinds: frozenset[str], **more: Any) -> None:
        """Reads all of these kinds, and tells it."""
        self.read(kinds, afresh=kind in (MARK, FAILURE) or self.writer.wants_key(), edge=kind != FAILURE)
        self.write(kind, label, **more)

    def write(self, kind: str, label: str, phase: int | None = None, **more: Any) -> None:
        """A moment with all that was read since the last one that was written."""
        # More than one reading: a fault of ours came between, and only the whole state is sure to be right.
        key = self.writer.wants_key(kind) or len(self._unwritten) > 1
        if key:
            # Exchanges since the last moment must not be lost in a whole state.
            told = self.inventory.state(exchanged_rows(self._unwritten) | self.writer.unwritten_exchanges)
        else:
            told = self._unwritten[0] if self._unwritten else []
        self.writer.moment(kind, label, self._phases.current.ordinal if phase is None else phase, told, key=key, **more)
        self._unwritten = []

    def trouble(self, where: str, error: BaseException) -> None:
        """Tells a fault of our own."""
        text = f"{type(error).__name__}: {error}"
        if (where, text) not in self._troubles and len(self._troubles) < TROUBLES:
            self._troubles.add((where, text))
            self.writer.trouble(where, text, self._phases.current.ordinal)
        else:
            self.writer.ask_key()
