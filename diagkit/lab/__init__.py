"""The laboratory: a simulated accelerator and engines to observe. It knows nothing of what observes it.

Importing it costs nothing and starts nothing; the names below load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagkit.lab.simdevice import Simulation, running, simulate

__all__ = ["Simulation", "running", "simulate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from diagkit.lab import simdevice

        return getattr(simdevice, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
