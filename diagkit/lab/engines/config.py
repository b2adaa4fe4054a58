"""What an engine is told at construction, with the names of both fields' configuration files beside each value."""

from __future__ import annotations

from dataclasses import dataclass, field

from diagkit.lab.models import DecoderConfig

__all__ = ["EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """Everything a lab engine can be told.

    ``offload_policy`` is verl's ``offload_policy`` and VeOmni's ``enable_fsdp_offload``: FSDP2's ``CPUOffloadPolicy``,
    under which FSDP owns the device. ``param_offload`` and ``optimizer_offload`` are the manual, whole-model offload
    between phases. Both at once is two owners of one thing (DK603), and the FSDP engine alone resolves it.
    ``pin_memory=False`` is the policy's option without which nothing can split. ``init_device`` is where every rank
    builds the module, ``cpu`` or ``meta``; None is the engine's own way. ``replicas > 1`` makes the mesh
    ``ddp x fsdp``. ``micro_batches`` of ``batch`` sequences with ``length`` tokens make one train step.
    """

    model: DecoderConfig = field(default_factory=DecoderConfig)
    offload_policy: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    pin_memory: bool = True
    init_device: str | None = None
    replicas: int = 1
    seed: int = 0
    lr: float = 1e-2
    max_norm: float = 1.0
    micro_batches: int = 2
    batch: int = 2
    length: int = 8
