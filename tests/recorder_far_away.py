"""An engine whose move of the model is three helpers deep, in a file that the test never mentions."""

from __future__ import annotations

from torch import nn


class FSDPEngine:
    """Saves as the field's engines do; ``guarded`` is the condition that the fix added."""

    def __init__(self, module: nn.Module, guarded: bool) -> None:
        self.module = module
        self.guarded = guarded

    def save_checkpoint(self) -> None:
        first = next(self.module.parameters())
        if not self.guarded and first.device.type == "cpu":
            load_model_to_device(self.module, "npu")


def load_model_to_device(module: nn.Module, device: str) -> None:
    _choose(module, device)


def _choose(module: nn.Module, device: str) -> None:
    really_move(module, device)


def really_move(module: nn.Module, device: str) -> None:
    module.to(device)  # here: far_away
