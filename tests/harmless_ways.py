"""Training as people do it, each kind in every way of watching it; prints digests of all that was computed.

One rank under FSDP2 on the simulated accelerator. A kind differs in how the model is sharded, or in how it is stepped.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harmless_training import digest
from recorder_world import begin, device, end, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from ways import WAYS, Phase, belongings, left_behind, observed, watched

from diagkit.lab.models import DecoderConfig, TinyDecoder
from diagkit.trace import open_trace

STEPS, MICRO = 3, 2


class Trainer:
    """A sharded decoder and its optimizer, with the operations of an engine."""

    def __init__(
        self, prepare: Callable[[TinyDecoder], None] = lambda model: None, accumulate: bool = False, **shard: Any
    ) -> None:
        torch.manual_seed(3)
        self.model: Any = TinyDecoder(DecoderConfig())
        prepare(self.model)
        shard = {"offload_policy": CPUOffloadPolicy(), **shard}
        for layer in self.model.model.layers:
            fully_shard(layer, **shard)
        fully_shard(self.model, **shard)
        self.model.model.rotary_emb.to(device())
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.accumulate = accumulate

    def train_batch(self, step: int) -> str:
        """One step of the optimizer over some micro-batches; the last loss, exactly."""
        for micro in range(MICRO):
            batch = tokens(MICRO * step + micro)
            if self.accumulate:
                self.model.set_requires_gradient_sync(micro == MICRO - 1)
            loss = nn.functional.cross_entropy(self.model(batch).flatten(0, 1).float(), batch.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        gradients = digest([parameter.grad for parameter in self.model.parameters()])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return f"{loss.item().hex()} {gradients}"

    def save(self) -> dict[str, Any]:
        """The model's own states."""
        return get_model_state_dict(self.model)

    def load(self, states: dict[str, Any]) -> None:
        """Puts states back."""
        set_model_state_dict(self.model, states)


def recomputed(reentrant: bool, model: TinyDecoder) -> None:
    """Lets each layer's activations be computed again in backward."""
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=reentrant)


def frozen(model: TinyDecoder) -> None:
    """Leaves one layer and the embedding as they are."""
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, Callable[[], Trainer]] = {
    "accumulation": functools.partial(Trainer, accumulate=True),
    "checkpointing, not reentrant": functools.partial(Trainer, functools.partial(recomputed, False)),
    "checkpointing, reentrant": functools.partial(Trainer, functools.partial(recomputed, True)),
    "mixed precision": functools.partial(Trainer, mp_policy=BF16),
    "frozen": functools.partial(Trainer, frozen),
    "gathered until backward": functools.partial(Trainer, reshard_after_forward=False),
}


def work(trainer: Trainer, phase: Phase) -> dict[str, str]:
    """Steps, a save, a step, a load, a step: digests of what all that made."""
    with phase("train"):
        losses = [trainer.train_batch(step) for step in range(STEPS)]
    with phase("save"):
        states = {name: value.clone() for name, value in trainer.save().items()}
    losses.append(trainer.train_batch(STEPS))
    with phase("load"):
        trainer.load(states)
    losses.append(trainer.train_batch(STEPS + 1))
    exported = {name: getattr(p, "full_tensor", p.clone)() for name, p in trainer.model.state_dict().items()}
    return {
        "losses": digest(losses),
        "saved": digest(states),
        "weights": digest(dict(trainer.model.named_parameters())),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "exported": digest(exported),
        "random": digest([torch.get_rng_state(), torch.npu.get_rng_state()]),
    }


def told(folder: pathlib.Path) -> dict[str, Any]:
    """What the trace says of itself."""
    [trace] = open_trace(next(iter(folder.rglob("rank-*.jsonl"))).parent)
    return {"problems": trace.problems, "troubles": trace.troubles, "ended": trace.ended, "moments": len(trace.moments)}


def main(folder_name: str) -> None:
    begin()
    before = observed()
    found: dict[str, dict[str, Any]] = {}
    watched("bare", pathlib.Path(), Trainer, work)  # what opens something once has opened it
    for number, (kind, make) in enumerate(KINDS.items()):
        for way in WAYS:
            folder = pathlib.Path(folder_name) / f"{number}-{way}"
            had = belongings()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                result = watched(way, folder, make, work)
            found.setdefault(kind, {})[way] = {
                **result,
                "left": left_behind(before),
                "belongings": [had, belongings()],
                "warned": [str(warning.message) for warning in warned if "diagkit" in str(warning.message)],
                "trace": None if way.startswith("bare") else told(folder),
            }
    end()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
