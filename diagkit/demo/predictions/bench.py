"""One sharded model with its optimizer, on which a state is provoked and an operation tried.

The model comes from outside, so that a prediction measured on one model can be tried on another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F

from diagkit.demo.predictions.models import Decoder
from diagkit.diagnosis.predictions.facets import Facets, facets
from diagkit.trace.reader import read_rank

if TYPE_CHECKING:
    from diagkit.capture import Recorder

POLICIES: dict[str, Callable[[], OffloadPolicy]] = {
    "none": OffloadPolicy,
    "pinned": lambda: CPUOffloadPolicy(pin_memory=True),
    "unpinned": lambda: CPUOffloadPolicy(pin_memory=False),
}


@dataclass(frozen=True)
class Kind:
    """How to make a model, which of its parts FSDP2 wraps one by one, and what it is fed."""

    make: Callable[[], nn.Module]
    parts: Callable[[nn.Module], list[nn.Module]]
    child: Callable[[nn.Module], nn.Module]  # a part that is no FSDP module itself
    vocab: int = 37
    length: int = 6


DECODER = Kind(
    make=Decoder,
    parts=lambda model: list(model.get_submodule("layers").children()),
    child=lambda model: model.get_submodule("layers.0.mlp"),
)
#: The same, but the forward pass uses its buffer where it finds it.
STRAIGHT = Kind(
    make=lambda: Decoder(moves_buffers=False),
    parts=DECODER.parts,
    child=DECODER.child,
)


@dataclass
class Bench:
    """A sharded model, its optimizer, and what it was before anything was done to it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    kind: Kind
    device: str
    weights: dict[str, Tensor] = field(
        default_factory=dict
    )  # a sharded state dict with other values than the live ones
    moments: dict[str, Any] = field(default_factory=dict)  # an optimizer state dict
    recorder: Recorder | None = None

    def loss(self) -> Tensor:
        """One forward pass on this rank's tokens, the same at each call."""
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        tokens = torch.randint(0, self.kind.vocab, (2, self.kind.length), generator=generator).to(self.device)
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def train(self) -> None:
        """One step, whose gradients stay."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def watch(self) -> None:
        """Records from here on: some states are told only by who saw how they came about."""
        from diagkit.capture import start

        self.recorder = start(self.model, self.optimizer, out=None)

    def facets(self) -> Facets:
        """The state that the live model is in."""
        from diagkit.capture import snapshot

        if self.recorder is None:
            return facets(snapshot(self.model, self.optimizer))
        self.recorder.mark("now")
        return facets(read_rank(self.recorder.lines))


def build(kind: Kind, policy: str, device: str = "npu", on_meta: bool = False) -> Bench:
    """A model on all ranks of the running process group, sharded under a policy of `POLICIES`.

    ``on_meta`` leaves it on the meta device, as before materialisation.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    home = "meta" if on_meta else "cpu" if policy != "none" else device
    with torch.device("meta" if on_meta else "cpu"):
        model = kind.make()
    if home == device:
        model.to(device)
    offload = POLICIES[policy]()
    for part in kind.parts(model):
        fully_shard(part, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    if not on_meta:
        buffers_to(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bench = Bench(model, optimizer, kind, device)
    if not on_meta:
        _remember(bench)
    return bench


def buffers_to(model: nn.Module, device: str) -> None:
    """Moves buffers alone."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _remember(bench: Bench) -> None:
    """What a checkpoint would hold: other values, and moments as after a step."""
    with torch.no_grad():
        bench.weights = {name: value.clone().mul_(0.5) for name, value in bench.model.state_dict().items()}
    for parameter in bench.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    before = [group["lr"] for group in bench.optimizer.param_groups]
    for group in bench.optimizer.param_groups:
        group["lr"] = 0.0
    bench.optimizer.step()
    bench.moments = copy.deepcopy(bench.optimizer.state_dict())
    bench.optimizer.zero_grad()
    bench.optimizer.state.clear()
    for group, lr in zip(bench.optimizer.param_groups, before, strict=True):
        group["lr"] = lr
    bench.moments["param_groups"] = copy.deepcopy(bench.optimizer.state_dict()["param_groups"])
