"""A move that a guard met: what it would have done, in words, and how the rest of it is done without the harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diagkit.capture.cause import from_stack
from diagkit.capture.gates import Function, parts
from diagkit.errors import MoveBlocked
from diagkit.remedy.functions import cast_of
from diagkit.remedy.offloaded import Offloaded
from diagkit.trace.schema import Frame


@dataclass(frozen=True, slots=True)
class Move:
    """A whole-module move of parameters that the policy keeps on the CPU."""

    call: str  # "Module.to"
    target: str  # "npu:0"
    module: str  # class of the moved module
    parameters: int  # how many of them would move
    harm: str
    early: bool  # lazy init has not run: it may be an initialisation that moves there and back
    frame: Frame  # the user's line

    @classmethod
    def of(cls, module: nn.Module, target: torch.device, moved: Sequence[Offloaded], recurse: bool) -> Move:
        """The move of ``module`` that is on the stack now."""
        cause = from_stack("Module._apply", (), "", 0)
        inside = {id(part) for part in parts(module, recurse)}
        return cls(
            call=cause.chain[-1] if cause.chain[-1:] and "." in cause.chain[-1] else cause.operation,
            target=str(target),
            module=type(module).__name__,
            parameters=len(moved),
            harm=_harm(moved, str(target), inside),
            early=all(entry.facts.lazy_init == "no" for entry in moved),
            frame=cause.frame or Frame("<unknown>", 0, "?"),
        )

    @property
    def line(self) -> str:
        """``"moves.py:48 load_model_to_device: Module.to npu:0"``."""
        return f"{self.frame}: {self.call} {self.target}"

    def blocked(self) -> MoveBlocked:
        """The error of a guard that raises; its text is also the warning of one that warns."""
        later = (
            ". If this is the model's own initialisation, which moves it there and back, enter the guard after it"
            if self.early
            else ""
        )
        return MoveBlocked(
            f"a move of {self.module} to {self.target} {self.harm}",
            found=f"{self.call} over {self.parameters} parameter{'s' * (self.parameters > 1)} under CPUOffloadPolicy",
            expected="parameters that stay on the CPU",
            where=str(self.frame),
            remedy=f"Leave the module where it is: FSDP2 brings each layer to the accelerator by itself. Move inputs "
            f"and buffers alone; copy a single tensor with p.to({self.target.partition(':')[0]!r}){later}",
        )


def _harm(moved: Sequence[Offloaded], target: str, inside: set[int]) -> str:
    if any(id(entry.owner) not in inside for entry in moved):
        return "goes past FSDP2, which would go on computing with their old bytes on the CPU, without a word (DK103b)"
    if any(entry.facts.pin_memory for entry in moved):
        return (
            f"splits its parameters: metadata {target}, bytes in pinned CPU memory, and the next state_dict(), first "
            "forward or backward raises (DK101)"
        )
    return f"puts its parameters wholly on {target}, and the next first forward or backward raises (DK103a)"


def cast_all(module: nn.Module, fn: Function, recurse: bool) -> None:
    """Does of ``fn``, one of PyTorch's own, the cast alone, to all that it would have moved."""
    dtypes = {
        tensor.dtype
        for part in parts(module, recurse)
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if isinstance(tensor, torch.Tensor)
    }
    casts = {dtype: cast_of(fn, dtype) for dtype in dtypes}
    if any(dtype is not cast for dtype, cast in casts.items()):
        module._apply(lambda tensor: tensor.to(casts.get(tensor.dtype, tensor.dtype)), recurse)


def move_others(module: nn.Module, fn: Function, recurse: bool, stays: Callable[[nn.Module, str], bool]) -> None:
    """Applies ``fn`` to the parameters in ``module`` of whose slots ``stays`` is not true; buffers stay."""
    shells = nn.Module()  # `_apply` itself decides how a parameter is exchanged
    moving: list[tuple[nn.Module, nn.Module]] = []
    for part in parts(module, recurse):
        others = {
            slot: value for slot, value in part._parameters.items() if value is not None and not stays(part, slot)
        }
        if others:
            shell = nn.Module()
            shell._parameters.update(others)
            shells.add_module(str(len(moving)), shell)
            moving.append((part, shell))
    shells._apply(fn)
    for part, shell in moving:
        part._parameters.update(shell._parameters)
