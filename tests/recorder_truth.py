"""Does things to sharded models at random, and says after each what is true, read without the recorder.

Each operation is a phase; the tests hold the state at its end against the truth.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from recorder_world import begin, end, sharded, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import diagkit as dk
from diagkit import torch_internals as internals

Optimizer = torch.optim.Optimizer
Do = Callable[[Any, Optimizer, random.Random], object]


def some_layer(model: Any, chance: random.Random) -> nn.Module:
    return chance.choice(list(model.model.layers))  # type: ignore[no-any-return]


def some_parameter(model: Any, chance: random.Random) -> nn.Parameter:
    return chance.choice(list(model.parameters()))  # type: ignore[no-any-return]


def freeze(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    parameter = some_parameter(model, chance)
    parameter.requires_grad_(not parameter.requires_grad)


def drop_gradient(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    some_parameter(model, chance).grad = None


def move_state(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    state = chance.choice(list(optimizer.state.values()) or [{}])
    for part in ("exp_avg", "step"):
        if part in state:
            state[part] = state[part].to("npu")


def new_buffer(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    some_layer(model, chance).register_buffer(f"extra{chance.randrange(3)}", torch.ones(chance.randrange(1, 4)))


def drop_buffer(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    layer = some_layer(model, chance)
    for name in [name for name in layer._buffers if name.startswith("extra")][:1]:
        delattr(layer, name)


def backward_alone(model: Any, optimizer: Optimizer, chance: random.Random) -> None:
    model(torch.zeros(1, 3, dtype=torch.int64, device="npu")).sum().backward()


DOINGS: dict[str, Do] = {
    "to npu": lambda m, o, c: m.to("npu"),
    "to cpu": lambda m, o, c: m.cpu(),
    "layer to npu": lambda m, o, c: some_layer(m, c).to("npu"),
    "layer to cpu": lambda m, o, c: some_layer(m, c).cpu(),
    "child to npu": lambda m, o, c: some_layer(m, c).mlp.to("npu"),
    "half": lambda m, o, c: m.half(),
    "float": lambda m, o, c: m.float(),
    "empty": lambda m, o, c: m.to_empty(device="cpu"),
    "train": lambda m, o, c: train_step(m, o, c.randrange(100)),
    "backward": backward_alone,
    "step": lambda m, o, c: o.step(),
    "zero": lambda m, o, c: o.zero_grad(set_to_none=c.random() < 0.5),
    "drop gradient": drop_gradient,
    "freeze": freeze,
    "move state": move_state,
    "load states": lambda m, o, c: o.load_state_dict(o.state_dict()),
    "state dict": lambda m, o, c: get_model_state_dict(m),
    "load": lambda m, o, c: m.load_state_dict(m.state_dict()),
    "unshard": lambda m, o, c: m.unshard(),
    "reshard": lambda m, o, c: m.reshard(),
    "new buffer": new_buffer,
    "drop buffer": drop_buffer,
    "buffers to npu": lambda m, o, c: m.model.rotary_emb.to("npu"),
}


#: Every storage that was ever seen, so that no address is used twice.
held: list[torch.UntypedStorage] = []


def truth(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Any]]:
    """``kind/name/part`` -> metadata device, storage device, type, pinned, wants gradients, address of its storage."""
    found: dict[str, list[Any]] = {}

    def say(kind: str, name: str, part: str, tensor: torch.Tensor) -> None:
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        held.append(storage)
        place = storage.device
        pinned = local.is_pinned() if place.type == "cpu" else None
        facts = [str(tensor.device), str(place), str(tensor.dtype), pinned, tensor.requires_grad]
        found[f"{kind}/{name}/{part}"] = [*facts, storage._cdata]

    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            found[f"parameter/{name}/"] = ["gathered"]
            continue
        say("parameter", name, "", parameter)
        if parameter.grad is not None:
            say("gradient", name, "", parameter.grad)
        for part, value in optimizer.state.get(parameter, {}).items():
            say("optimizer_state", name, part, value)
    for name, buffer in model.named_buffers():
        say("buffer", name, "", buffer)
    return found


def groups(model: nn.Module) -> dict[str, list[Any]]:
    """Module -> sharded state, training state and root mark of its FSDP2 group."""
    found: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[no-untyped-call]
            [group] = internals.state_groups(state)
            found[name] = [group._sharded_state.name.lower(), group._training_state.name.lower(), state._is_root]
    return found


def trained(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """How many tensors the optimizer holds, and how many trainable ones of the model it does not hold."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    live = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [len(held), sum(parameter.requires_grad and id(parameter) not in held for parameter in live)]


def main(folder_name: str, seed: str) -> None:
    begin()
    folder = pathlib.Path(folder_name)
    told: list[dict[str, Any]] = []
    for number in range(8):
        chance = random.Random(int(seed) * 100 + number)
        model = sharded(seed=number, layers=3)
        optimizer = torch.optim.AdamW(model.parameters())
        done: list[Any] = []
        with dk.record(model, optimizer, out=folder / str(number)) as rec:
            for name in ["train", *(chance.choice(list(DOINGS)) for _ in range(25))]:
                error = ""
                with rec.phase(name):
                    try:
                        DOINGS[name](model, optimizer, chance)
                    except Exception as failed:  # on a split model much fails; what is true afterwards counts
                        error = type(failed).__name__
                done.append([name, error, truth(model, optimizer), groups(model), trained(model, optimizer)])
        told.append({"done": done})
    end()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
