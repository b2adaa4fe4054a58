"""Who is asked before a module's `_apply` runs: `remedy`'s guards.

They share the recorder's patches (`hooks`), because two tools that each wrap the same function and leave in any order
could not both give back what they found. A gate is asked once for a whole call: the same function on its way to the
children of a module that was let pass is no call of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

#: ``gate(module, fn)``: True where the call is not to run (it is answered with the module), False where it may, None
#: where the module is none of its own. It may raise.
Gate = Callable[[nn.Module, Any], bool | None]

#: The gates that stand, the newest first.
standing: tuple[Gate, ...] = ()
_here = threading.local()


def add(gate: Gate) -> None:
    """Asks this gate from now on, before those that were there."""
    global standing
    standing = (gate, *standing)


def remove(gate: Gate) -> None:
    """Asks it no more. A second time is harmless."""
    global standing
    standing = tuple(other for other in standing if other is not gate)


def through(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of `_apply` if the newest gate that knows the module lets it pass."""
    fn = kwargs["fn"] if "fn" in kwargs else args[1] if len(args) > 1 else None
    outer = getattr(_here, "fn", None)
    if not args or (fn is outer and fn is not None):
        return call(*args, **kwargs)
    if next((answer for gate in standing if (answer := gate(args[0], fn)) is not None), False):
        return args[0]
    _here.fn = fn
    try:
        return call(*args, **kwargs)
    finally:
        _here.fn = outer
