"""Classes whose objects are engines: each is attached to as soon as it is made, whatever made it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

#: Engines whose constructor is running, the innermost last.
making: list[Any] = []


def role_of(engine: object) -> str:
    """``"critic"``, ``"ref"`` or ``"actor"`` of an RL engine, as far as it says so itself; else its class's name."""
    config = getattr(engine, "engine_config", None)
    name = type(engine).__name__
    if "Value" in name:
        return "critic"
    if getattr(config, "forward_only", False):
        return "ref"
    return "actor" if config is not None else name


class EngineClass:
    """Attaches to every object of a class and of its subclasses, from its construction on."""

    def __init__(self, module: str, name: str, made: Callable[[Any], None]) -> None:
        self._module, self._name, self._made = module, name, made
        self._base: Any = None
        self._covers: list[tuple[type, str, Any, Any]] = []
        self.awake = False

    def arrived(self) -> None:
        """Covers the class, now that its module is there."""
        self._base = importlib.import_module(self._module)
        for part in self._name.split("."):
            self._base = getattr(self._base, part)
        self.awake = True
        self._cover_subclasses(self._base)
        for cls in [self._base, *_descendants(self._base)]:
            self._cover_init(cls)

    def leave(self) -> None:
        """Uncovers what is still ours to uncover."""
        self.awake = False
        while self._covers:
            cls, name, cover, before = self._covers.pop()
            if vars(cls).get(name) is cover:
                if before is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)

    def _cover_subclasses(self, base: Any) -> None:
        before = vars(base).get("__init_subclass__")
        watch = self

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            if before is None:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                before.__get__(None, cls)(**kwargs)
            if watch.awake:
                watch._cover_init(cls)

        self._put(base, "__init_subclass__", classmethod(__init_subclass__), before)

    def _cover_init(self, cls: Any) -> None:
        before = vars(cls).get("__init__")
        if before is None:
            return  # that of a base class, which is covered
        watch = self

        def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
            making.append(engine)
            try:
                before(engine, *args, **kwargs)
            finally:
                making.pop()
            if watch.awake:
                with contextlib.suppress(Exception):
                    watch._made(engine)

        self._put(cls, "__init__", functools.wraps(before)(__init__), before)

    def _put(self, cls: type, name: str, cover: Any, before: Any) -> None:
        setattr(cls, name, cover)
        self._covers.append((cls, name, cover, before))


def _descendants(cls: type) -> list[type]:
    found: list[type] = []
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        found += [child, *_descendants(child)]
    return found
