"""Pictures of where tensors live: each answers one question, and says the same in words and on a page without a kernel.

A name loads its module on first use: a trace that shows itself as HTML needs no matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from diagkit.errors import MissingDependency

if TYPE_CHECKING:
    from diagkit.views.explorer import Explorer, explore
    from diagkit.views.figure import ViewFigure
    from diagkit.views.grid import rank_grid
    from diagkit.views.lifelines import lifeline
    from diagkit.views.maps import before_after, residency_map
    from diagkit.views.matrix import outcome_matrix
    from diagkit.views.printed import wrapped
    from diagkit.views.volumes import bytes_by_device
    from diagkit.views.whatif_panel import whatif

__all__ = [
    "Explorer",
    "ViewFigure",
    "before_after",
    "bytes_by_device",
    "explore",
    "lifeline",
    "outcome_matrix",
    "rank_grid",
    "residency_map",
    "whatif",
    "wrapped",
]

_HOMES = {
    "Explorer": "explorer",
    "ViewFigure": "figure",
    "before_after": "maps",
    "bytes_by_device": "volumes",
    "explore": "explorer",
    "lifeline": "lifelines",
    "outcome_matrix": "matrix",
    "rank_grid": "grid",
    "residency_map": "maps",
    "whatif": "whatif_panel",
    "wrapped": "printed",
}

_NEEDS = {"matplotlib": ("figures need", "report"), "ipywidgets": ("the laboratory needs", "notebook")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDS:
            raise
        what, extra = _NEEDS[missing]
        raise MissingDependency(f"{what} {missing}", remedy=f"pip install 'diagkit[{extra}]'") from None
    value = getattr(module, name)
    globals()[name] = value
    return value
