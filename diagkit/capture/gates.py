"""Who is asked before a module's `_apply` runs: `remedy`'s guards.

They share the recorder's patches (`hooks`), because two tools that each wrap the same function and leave in any order
could not both give back what they found. A gate is asked once for a module and all in it: the same function on its way
to the children is no call of its own. A module that forwards the call to one that it hides from its children
(`object.__setattr__`, a list) is another matter: nobody knew of that one, so it is asked about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from diagkit import torch_internals as internals

Function = Callable[[Any], Any]
#: ``gate(module, fn, recurse)``: True where the call is not to run (it is answered with the module), False where it
#: may, a function that is to be applied instead of ``fn``, or None where nothing in the module is the gate's. It may
#: raise.
Gate = Callable[[nn.Module, Function, bool], "Function | bool | None"]

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
    given = dict(zip(("module", "fn", "recurse"), args, strict=False)) | kwargs
    module, fn, recurse = given.get("module"), given.get("fn"), bool(given.get("recurse", True))
    before = getattr(_here, "asked", None)
    if module is None or fn is None or (before is not None and fn is before[0] and id(module) in before[1]):
        return call(*args, **kwargs)
    inside = {id(part) for part in parts(module, recurse)}
    _here.asked = fn, inside
    try:
        answer = next((said for gate in standing if (said := gate(module, fn, recurse)) is not None), False)
        if answer is True:
            return module
        if answer is False:
            return call(*args, **kwargs)
        _here.asked = answer, inside
        return call(module, answer, recurse)
    finally:
        _here.asked = before


def parts(module: nn.Module, recurse: bool) -> list[nn.Module]:
    """The modules that a call of `_apply` goes to."""
    return [part for _, part in internals.named_modules(module)] if recurse else [module]
