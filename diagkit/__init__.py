"""diagkit tells, per parameter, where the metadata says a tensor lives and where its bytes live.

Importing it costs next to nothing and imports neither torch nor anything else: a public name loads its room when it is
first used.
"""

from __future__ import annotations

import importlib

# Not typing's: importing that costs more than all the rest of this module, and checkers know the name anyway.
TYPE_CHECKING = False
if TYPE_CHECKING:  # the same names once more, for editors and type checkers
    from diagkit.capture import attach, record
    from diagkit.live import explain, inspect
    from diagkit.remedy import guard, heal
    from diagkit.trace import open_trace
    from diagkit.views import explore

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOMES: dict[str, str] = {
    "attach": "diagkit.capture",
    "explain": "diagkit.live",
    "explore": "diagkit.views",
    "guard": "diagkit.remedy",
    "heal": "diagkit.remedy",
    "inspect": "diagkit.live",
    "open_trace": "diagkit.trace",
    "record": "diagkit.capture",
}

# Rooms that are part of the public face as they are, such as ``diagkit.lab``.
_ROOMS: frozenset[str] = frozenset({"errors", "lab"})

__all__ = ["__version__", "attach", "explain", "explore", "guard", "heal", "inspect", "open_trace", "record"]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: object) -> None:
    """``%load_ext diagkit``: the commands of `diagkit.views.magics`."""
    importlib.import_module(f"{__name__}.views.magics").load(shell)


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext diagkit``."""
    importlib.import_module(f"{__name__}.views.magics").unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
