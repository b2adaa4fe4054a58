"""The two engines under study, small enough to read, at every revision of the fix.

They know nothing of the recorder: diagkit watches them from outside, as it watches the real ones.

Source of every order and condition: verl's and VeOmni's sources, read and run at the revisions named in `guards.py`.
"""

from __future__ import annotations

from diagkit.errors import UsageError
from diagkit.lab.engines.config import EngineConfig
from diagkit.lab.engines.fsdp import FSDPEngine
from diagkit.lab.engines.guards import GUARDS, REVISIONS, Guard, Revision, revision
from diagkit.lab.engines.veomni import VeOmniEngine

__all__ = [
    "ENGINES",
    "GUARDS",
    "REVISIONS",
    "EngineConfig",
    "FSDPEngine",
    "Guard",
    "Revision",
    "VeOmniEngine",
    "build_engine",
    "revision",
]

ENGINES: dict[str, type[FSDPEngine]] = {"fsdp": FSDPEngine, "veomni": VeOmniEngine}
"""The engines by the name that the command line uses."""


def build_engine(
    name: str,
    rev: str | Revision = "current",
    config: EngineConfig | None = None,
    device: str = "npu",
) -> FSDPEngine:
    """An initialised engine; every rank of the default process group together.

    Raises:
        UsageError: unknown engine or revision.

    Example (in a process group): ``engine = build_engine("fsdp", "before"); engine.save_checkpoint("ckpt")``
    """
    if name not in ENGINES:
        raise UsageError("unknown engine", found=name, remedy=f"Choose one of {', '.join(ENGINES)}")
    chosen = revision(rev) if isinstance(rev, str) else rev
    engine = ENGINES[name](config or EngineConfig(), chosen, device)
    engine.initialize()
    return engine
