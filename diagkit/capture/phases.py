"""The phases that are open, innermost last, and the calls observed in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

#: Modules through which a phase is entered for a block of somebody else's.
_WAYS_IN = ("contextlib", "diagkit.capture.follow")


@dataclass(slots=True)
class OpenPhase:
    """One phase under way."""

    ordinal: int
    name: str
    parent: int  # ordinal
    frame: int  # id of the frame that began it
    calls: dict[str, int] = field(default_factory=dict)


_OUTSIDE = OpenPhase(0, "", 0, 0)


class Phases:
    """A stack of phases; ``current`` is the innermost, with ordinal 0 outside any."""

    def __init__(self) -> None:
        self._open: list[OpenPhase] = []
        self.current = _OUTSIDE
        self.count = 0  # begun so far

    def __contains__(self, phase: OpenPhase) -> bool:
        return phase in self._open

    def begin(self, name: str, caller: FrameType) -> OpenPhase:
        """Opens a phase for the code of this frame, or of the one for whose block it was entered."""
        while caller.f_back is not None and caller.f_globals.get("__name__") in _WAYS_IN:
            caller = caller.f_back
        self.count += 1
        self.current = OpenPhase(self.count, name, self.current.ordinal, id(caller))
        self._open.append(self.current)
        return self.current

    def end(self, phase: OpenPhase) -> None:
        """Closes it, if it is open."""
        if phase in self._open:
            self._open.remove(phase)
            self.current = self._open[-1] if self._open else _OUTSIDE

    def cut(self) -> Iterator[OpenPhase]:
        """Those that nobody closed, innermost first, each closed after its turn."""
        for phase in reversed(list(self._open)):
            yield phase
            self.end(phase)

    def note(self, name: str, times: int = 1) -> None:
        """Counts an observed call."""
        if self._open:
            calls = self.current.calls
            calls[name] = calls.get(name, 0) + times
