"""Records a job by environment variables alone: ``DIAGKIT_TRACE=DIR``, and this module imported.

``import diagkit.auto`` in the code, or ``VERL_USE_EXTERNAL_MODULES=diagkit.auto`` for verl's workers. Before torch or
after it, once or twice, in a process that uses FSDP2 or in one that never does. Without the variable it does nothing at
all. The other variables are those of `diagkit.run.options`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagkit.run.door import Door

__all__ = ["stop"]

_door: Door | None = None


def _begin() -> None:
    from diagkit.run.door import open_door

    global _door
    _door = open_door(explains=True)


def stop() -> None:
    """Takes everything out again and closes the trace; harmless where nothing was begun."""
    global _door
    if _door is not None:
        _door.close()
        _door = None


if os.environ.get("DIAGKIT_TRACE") and _door is None:
    _begin()
