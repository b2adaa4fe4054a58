"""Which FSDP groups an optimizer has written while their parameters were gathered.

The optimizer writes the sharded parameters, and a group that is gathered at that time goes on computing with what it
had gathered before. Looked at once a step, a few attributes a group; parameters only of a group that is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from diagkit.capture.facts import GroupWatch


class Gathered:
    """Marks groups as stale, and takes the mark away where nothing was computed with the old weights."""

    def __init__(self, groups: Callable[[], Iterable[GroupWatch]], trained: Callable[[], set[int]]) -> None:
        self._groups = groups
        self._trained = trained
        self._stale: dict[int, GroupWatch] = {}  # by id
        self._used: set[int] = set()  # sharded again by a pass, which has computed with the old weights

    def stepped(self) -> bool:
        """After an optimizer's step: whether a group is stale that was not."""
        before = set(self._stale)
        for watch in self._stale.values():
            watch.stale = False
        found = [watch for watch in self._groups() if watch.gathered]
        trained = self._trained() if found else set()
        self._stale = {id(watch): watch for watch in found if watch.has_gradients(trained)}
        self._used.clear()
        for watch in self._stale.values():
            watch.stale = True
        return not before.issuperset(self._stale)

    def due(self) -> None:
        """Before an observed call: what is sharded by now, no observed call has sharded."""
        self._used.update(key for key, watch in self._stale.items() if not watch.gathered)

    def sharded(self) -> None:
        """After an observed call: what it has sharded is read anew by the next pass."""
        for key, watch in list(self._stale.items()):
            if key not in self._used and not watch.gathered:
                watch.stale = False
                del self._stale[key]
