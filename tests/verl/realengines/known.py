"""Where the lab's engines differ from verl's on purpose, each with its reason. Nothing else may differ."""

from __future__ import annotations

from realengines.compare import KnownDifference

KNOWN: tuple[KnownDifference, ...] = ()
