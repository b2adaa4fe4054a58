"""Whether a model is ready to be guarded: sharded, materialised, and not on its way through an initialisation.

A full-state load moves a sharded model to the accelerator and back before its first forward pass, at every revision of
the engines under study. A guard that met that move would stop what is right.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.residency import residency
from diagkit.errors import UsageError
from diagkit.remedy.offloaded import offloaded
from diagkit.trace.schema import device_type


def check(models: Mapping[str, nn.Module], subject: object) -> None:
    """Says plainly what is missing.

    Raises:
        UsageError: there is no model, or it is too early to guard one.
    """
    if not models:
        raise UsageError(
            "nothing to guard",
            found=f"{type(subject).__name__} without a model",
            expected="a module, several, or an engine that has initialised",
            remedy="Enter the guard after the engine has initialised",
        )
    for model in models.values():
        if not internals.has_fsdp(model):
            if not _has_fsdp1(model):
                raise _early(model, "it is not sharded", "a model after fully_shard")
            continue
        for entry in offloaded(model):
            facts = residency(entry.record.sharded_param, entry.record)
            if facts.metadata_device == "meta":
                raise _early(model, f"{entry.name} is on meta", "parameters that have bytes")
            if entry.facts.lazy_init == "no" and {
                device_type(facts.metadata_device),
                device_type(facts.storage_device),
            } != {"cpu"}:
                raise UsageError(
                    "too early to guard, or too late",
                    found=f"{entry.name} is {facts.short()} before the first forward pass",
                    expected="parameters on the CPU",
                    where=type(model).__name__,
                    remedy="Enter the guard after the engine has initialised; if it has, mend first: dk.heal(model)",
                )


def _early(model: nn.Module, found: str, expected: str) -> UsageError:
    return UsageError(
        "too early to guard",
        found=found,
        expected=expected,
        where=type(model).__name__,
        remedy="Enter the guard after the model is sharded and loaded, after the engine has initialised",
    )


def _has_fsdp1(model: nn.Module) -> bool:
    """Whether it is FSDP1's, which may be moved by hand."""
    wrapper = getattr(internals.loaded("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(m, wrapper) for _, m in internals.named_modules(model))
