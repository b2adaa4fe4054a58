"""What an observed call was made on, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from diagkit import torch_internals as internals
from diagkit.capture.survey import Model


def module_of(subject: object) -> nn.Module | None:
    """The module, or the one that a part of FSDP2 belongs to; None for a stranger."""
    return subject if isinstance(subject, nn.Module) else internals.module_of(subject)


def subject_name(models: Iterable[Model], subject: object) -> str:
    """``"layers.0"`` (after its model's label where several are watched); a class name for roots and strangers."""
    models = list(models)
    module = module_of(subject)
    for model in models:
        name = model.names.get(id(module))
        if name is not None and len(models) > 1:
            return f"{model.label}.{name}" if name else model.label
        if name:
            return name
    return type(subject if module is None else module).__name__
