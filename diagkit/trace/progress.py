"""Tells on stderr how far a long reading is: in place on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys

#: Fewer ranks are read before anybody wonders; elsewhere than on a terminal every so many ranks are told.
FEW, EVERY = 64, 256


def on_stderr(done: int, of: int) -> None:
    """A `Progress` for commands."""
    if of < FEW:
        return
    terminal = sys.stderr.isatty()
    text = f"read {done:,} of {of:,} ranks"
    if terminal:
        print(f"\r{text}", end="\n" if done == of else "", file=sys.stderr, flush=True)
    elif done % EVERY == 0 or done == of:
        print(text, file=sys.stderr, flush=True)
