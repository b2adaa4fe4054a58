"""Lets the ranks of a job agree on a name, through the store that their process group has already.

One round trip to the store, no collective: whoever comes first decides, nobody waits for anybody.
"""

from __future__ import annotations

import os
import secrets
import time

from diagkit import torch_internals as internals


def agreed(key: str, proposal: str) -> str:
    """The proposal of the rank that came first; our own where there is no process group or its store cannot do it."""
    store = internals.default_store()
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
