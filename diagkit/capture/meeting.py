"""Lets the ranks of a job agree on a name, or show what they have together, through their process group's own store.

No collective: nobody waits for a rank that is busy or gone.
"""

from __future__ import annotations

import os
import secrets
import time
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


# ---- looks of several ranks on one screen

_asked = "diagkit/asked"
_answered = 0


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
        return _ask(store, payload, world, seconds) if rank == 0 else _answer(store, payload, rank, seconds / 2)
    except Exception:  # the store is gone with its host
        return {rank: payload}


def _ask(store: Any, payload: bytes, world: int, seconds: float) -> dict[int, bytes]:
    number = store.add(_asked, 1)
    store.set(f"{_asked}/{number}", "open")
    found = {0: payload}
    deadline = time.monotonic() + seconds
    while len(found) < world and time.monotonic() < deadline:
        for rank in range(1, world):
            key = f"{_asked}/{number}/{rank}"
            if rank not in found and store.check([key]):
                found[rank] = store.get(key)
        time.sleep(0.02)
    store.set(f"{_asked}/{number}", "closed")
    return found


def _answer(store: Any, payload: bytes, rank: int, seconds: float) -> dict[int, bytes] | None:
    global _answered
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number = store.add(_asked, 0)
        key = f"{_asked}/{number}"
        if number > _answered and store.check([key]) and store.get(key) == b"open":
            _answered = number
            store.set(f"{key}/{rank}", payload)
            return None
        time.sleep(0.02)
    return {rank: payload}
