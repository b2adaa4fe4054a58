"""Lets the ranks of a job agree on a name, or show what they have together, through their process group's own store.

No collective: nobody waits for a rank that is busy or gone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from diagkit import torch_internals as internals

_inherited: Any = None


def _forked() -> None:
    # A child shares its parent's connection to the store: a word of its own would end up in the middle of the parent's.
    global _inherited
    _inherited = internals.default_store()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _store() -> Any | None:
    """The process group's store, if it is this process's own."""
    store = internals.default_store()
    return None if store is _inherited else store


def agreed(key: str, proposal: str) -> str:
    """The proposal of the rank that came first; our own where there is no process group or its store cannot do it."""
    store = _store()
    if store is None:
        return proposal
    try:
        answer = store.compare_set(f"diagkit/{key}", "", proposal)
        return answer.decode() if isinstance(answer, bytes) else str(answer)
    except Exception:  # a store for tests, or one whose host is gone: a trace with a name of its own is still a trace
        return proposal


def run_name() -> str:
    """A name for this run that no other run has, the same on all its ranks: ``"20260102-030405-a1b2c3"``.

    Without a process group the ranks of a job can only be told to agree: by ``DIAGKIT_RUN``.
    """
    given = os.environ.get("DIAGKIT_RUN", "")
    if given:
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in given).lstrip(".")[:80] or "run"
    return agreed("run", time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3))


# ---- what several ranks bring together

#: By topic, how many meetings this process has answered.
_answered: dict[str, int] = {}


def gathered(payload: bytes, seconds: float = 10.0) -> dict[int, bytes] | None:
    """Brings what each rank has to rank 0, when all of them do the same thing at about the same time, as in a notebook
    whose kernels are ranks.

    On rank 0: payloads by rank, of those that came in time. On another rank: None where rank 0 took its payload, else
    (rank 0 asked nobody) its own alone. No collective: a rank that is busy or gone is not waited for forever.
    """
    rank, world = internals.rank_and_world()
    store = _store()
    if store is None or world == 1:
        return {rank: payload}
    try:
        if rank == 0:
            return _ask(store, "asked", payload, range(world), seconds)[1]
        return {rank: payload} if _answer(store, "asked", payload, rank, seconds / 2) is None else None
    except Exception:  # the store is gone with its host
        return {rank: payload}


def decided(
    topic: str, payload: bytes, ranks: Sequence[int], decide: Callable[[dict[int, bytes]], bytes], seconds: float
) -> bytes | None:
    """What the first of these ranks decides of what each of them brings, the same answer on all of them.

    ``decide`` gets the payloads of those that came within ``seconds``, perhaps not all. None where the first rank did
    not come. No collective, so that a rank that never comes costs the others this time and no more, and any process
    group will do.
    """
    rank, _ = internals.rank_and_world()
    store = _store()
    if store is None or list(ranks) == [rank]:
        return decide({rank: payload})
    if rank == ranks[0]:
        number, found = _ask(store, topic, payload, ranks, seconds)
        answer = decide(found)
        store.set(f"{_key(topic)}/{number}/decided", answer)
        return answer
    meeting = _answer(store, topic, payload, rank, seconds)
    # The first rank waits for others as long as this, then it decides.
    return None if meeting is None else _value(store, f"{_key(topic)}/{meeting}/decided", 2 * seconds)


def _key(topic: str) -> str:
    return f"diagkit/{topic}"


def _ask(store: Any, topic: str, payload: bytes, ranks: Sequence[int], seconds: float) -> tuple[int, dict[int, bytes]]:
    """Opens a meeting: its number, and the payloads of those that came."""
    number = store.add(_key(topic), 1)
    place = f"{_key(topic)}/{number}"
    store.set(place, "open")
    found = {ranks[0]: payload}
    deadline = time.monotonic() + seconds
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank not in found and store.check([f"{place}/{rank}"]):
                found[rank] = store.get(f"{place}/{rank}")
        time.sleep(0.02)
    store.set(place, "closed")
    return number, found


def _answer(store: Any, topic: str, payload: bytes, rank: int, seconds: float) -> int | None:
    """Brings a payload to the meeting that is open or opens in this time: its number, None where none is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number = store.add(_key(topic), 0)
        place = f"{_key(topic)}/{number}"
        if number > _answered.get(topic, 0) and _value(store, place, 0) == b"open":
            _answered[topic] = int(number)
            store.set(f"{place}/{rank}", payload)
            return int(number)
        time.sleep(0.02)
    return None


def _value(store: Any, key: str, seconds: float) -> bytes | None:
    """What stands under a key within this time."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return bytes(store.get(key))
