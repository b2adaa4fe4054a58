"""The states in which operations are tried, and how each really comes about.

Every recipe uses what users use: moves, loads, forward and backward passes that fail. Splits made by hand alone
write to a private attribute, as the code that causes it in the field does.

Without a state are hazards in which each of these operations does what it does in a healthy model: memory held twice
(DK702) and groups that disagree (DK802a). A tie that came apart (DK203) is the state of its dead optimizer where a load
parted it, and a healthy model of one parameter more where materialising did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from diagkit.demo.predictions.bench import Bench, buffers_to

#: What the code in the field writes to, too.
_INNER = "_local_tensor"


@dataclass(frozen=True)
class State:
    """A name, a policy, and what is done to a fresh bench; ``code`` is the hazard that it shows, "" for none."""

    name: str
    policy: str
    recipe: tuple[Callable[[Bench], None], ...] = ()
    code: str = ""
    on_meta: bool = False
    group: str = "mixed"  # "mixed": with a CPU backend; "alone": without
    ranks: tuple[int, ...] = (1, 2)


def _train(bench: Bench) -> None:
    bench.train()


def _no_grads(bench: Bench) -> None:
    bench.optimizer.zero_grad()


def _forward_only(bench: Bench) -> None:
    """Runs lazy init; neither gradients nor optimizer state come of it."""
    with torch.no_grad():
        bench.loss()
    bench.model.reshard()  # type: ignore[operator]


def _to_device(bench: Bench) -> None:
    bench.model.to(bench.device)


def _to_cpu(bench: Bench) -> None:
    bench.model.to("cpu")


def _buffers_back(bench: Bench) -> None:
    buffers_to(bench.model, bench.device)


def _move_child(bench: Bench) -> None:
    bench.kind.child(bench.model).to(bench.device)


def _inverse_split(bench: Bench) -> None:
    for parameter in bench.model.parameters():
        setattr(parameter, _INNER, getattr(parameter, _INNER).to(bench.device))


def _failed_forward(bench: Bench) -> None:
    with contextlib.suppress(RuntimeError):
        bench.loss()


def _failed_backward(bench: Bench) -> None:
    # The first layer is the last of the backward pass: late enough for FSDP2 to be in the middle of things.
    handle = bench.kind.parts(bench.model)[0].register_full_backward_hook(_raise)
    with contextlib.suppress(ValueError):
        bench.loss().backward()
    handle.remove()
    bench.optimizer.zero_grad()


def _raise(*_: object) -> None:
    raise ValueError("a mistake in a user's own hook")


def _load_moments(bench: Bench) -> None:
    bench.optimizer.load_state_dict(bench.moments)


def _moments_to_device(bench: Bench) -> None:
    for state in bench.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(bench.device)


def _exchange_shards(bench: Bench) -> None:
    """What an offloader does that knows one of the two handles: the bytes are the same, the storage is another."""
    for parameter in bench.model.parameters():
        setattr(parameter, _INNER, getattr(parameter, _INNER).clone())


def _cast_through_data(bench: Bench) -> None:
    for parameter in bench.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def _load_by_assignment(bench: Bench) -> None:
    bench.model.load_state_dict({n: v.clone() for n, v in bench.model.state_dict().items()}, assign=True)


def _split_moments(bench: Bench) -> None:
    """Exchanges what is under the moments alone, as an offloader does."""
    for state in bench.optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                away = "cpu" if value.device.type != "cpu" else bench.device
                setattr(value, _INNER, getattr(value, _INNER).to(away))


def _evaluate_between_backward_and_step(bench: Bench) -> None:
    """The root stays gathered after the evaluation, and the step writes the shards alone."""
    bench.watch()
    bench.loss().backward()
    with torch.no_grad():
        bench.loss()
    bench.optimizer.step()


def _share_memory(bench: Bench) -> None:
    """Shown to another process: both handles lose their pin."""
    for parameter in bench.model.parameters():
        getattr(parameter, _INNER).share_memory_()


def _register_late(bench: Bench) -> None:
    """An adapter put into a layer that is wrapped; checkpoints hold it, too."""
    bench.watch()
    layer = bench.kind.parts(bench.model)[0]
    layer.register_parameter("late", nn.Parameter(torch.zeros(1)))
    layer.register_forward_hook(lambda module, _, out: out + module.late)
    bench.weights |= {name: torch.ones(1) for name, _ in bench.model.named_parameters() if name.endswith(".late")}


_TRAINED = (_train, _no_grads)

STATES: tuple[State, ...] = (
    State("pinned, healthy, new", "pinned"),
    State("pinned, healthy, after a forward", "pinned", (_forward_only,)),
    State("pinned, healthy, trained", "pinned", _TRAINED),
    State("pinned, healthy, trained, with gradients", "pinned", (_train,)),
    State("pinned, healthy, new, no CPU backend", "pinned", (), "", group="alone", ranks=(2,)),
    State("pinned, healthy, trained, no CPU backend", "pinned", _TRAINED, "", group="alone", ranks=(2,)),
    State("pinned, gradients, no CPU backend", "pinned", (_train,), "DK402", group="alone", ranks=(2,)),
    State("unpinned, healthy, new", "unpinned"),
    State("unpinned, healthy, trained", "unpinned", _TRAINED),
    State("unpinned, healthy, trained, with gradients", "unpinned", (_train,)),
    State("no policy, new", "none"),
    State("no policy, trained", "none", _TRAINED),
    State("no policy, trained, with gradients", "none", (_train,)),
    State("no policy, parked on the CPU", "none", (*_TRAINED, _to_cpu)),
    State("split, new", "pinned", (_to_device,), "DK101"),
    State("split, after a forward", "pinned", (_forward_only, _to_device), "DK101"),
    State("split, trained", "pinned", (*_TRAINED, _to_device), "DK101"),
    State("split, trained, with gradients", "pinned", (_train, _to_device), "DK301"),
    State("split, trained, no CPU backend", "pinned", (*_TRAINED, _to_device), "DK101", group="alone", ranks=(2,)),
    State("hand split, new", "pinned", (_inverse_split,), "DK102"),
    State("hand split, trained", "pinned", (*_TRAINED, _inverse_split), "DK102"),
    State("moved, new", "unpinned", (_to_device,), "DK103a"),
    State("moved, trained", "unpinned", (*_TRAINED, _to_device), "DK103a"),
    State("child moved, new", "pinned", (_move_child,), "DK103b"),
    State("child moved, trained", "pinned", (*_TRAINED, _move_child), "DK103b"),
    State("on meta", "pinned", (), "DK104", on_meta=True),
    State("moments on the accelerator", "pinned", (*_TRAINED, _moments_to_device), "DK302"),
    State("moments on the accelerator, with gradients", "pinned", (_train, _moments_to_device), "DK302"),
    State(
        "moments loaded while split, then mended",
        "pinned",
        (*_TRAINED, _to_device, _load_moments, _to_cpu, _buffers_back),
        "DK302",
    ),
    State("buffers dragged to the CPU, new", "pinned", (_to_device, _to_cpu), "DK501"),
    State("buffers dragged to the CPU, trained", "pinned", (*_TRAINED, _to_device, _to_cpu), "DK501"),
    State(
        "poisoned lazy init",
        "pinned",
        (_to_device, _failed_forward, _to_cpu, _buffers_back),
        "DK601",
    ),
    State("poisoned lazy init, still split", "pinned", (_to_device, _failed_forward), "DK601"),
    State("detached", "pinned", (*_TRAINED, _exchange_shards), "DK201"),
    State("detached, no policy", "none", (*_TRAINED, _exchange_shards), "DK201"),
    State("cast through .data", "pinned", (*_TRAINED, _cast_through_data), "DK105"),
    State("cast through .data, no policy", "none", (*_TRAINED, _cast_through_data), "DK105"),
    State("dead optimizer, new", "pinned", (_load_by_assignment,), "DK202"),
    State("dead optimizer, trained", "pinned", (*_TRAINED, _load_by_assignment), "DK202"),
    State("dead optimizer, trained, no policy", "none", (*_TRAINED, _load_by_assignment), "DK202"),
    State("moments split", "pinned", (*_TRAINED, _split_moments), "DK303"),
    State("moments split, no policy", "none", (*_TRAINED, _split_moments), "DK303"),
    State("written while gathered", "pinned", (*_TRAINED, _evaluate_between_backward_and_step), "DK602"),
    State("written while gathered, no policy", "none", (*_TRAINED, _evaluate_between_backward_and_step), "DK602"),
    State("pin lost, new", "pinned", (_share_memory,), "DK701"),
    State("pin lost, trained", "pinned", (*_TRAINED, _share_memory), "DK701"),
    State("registered after wrapping, new", "pinned", (_register_late,), "DK802b"),
    State("registered after wrapping, trained", "pinned", (*_TRAINED, _register_late), "DK802b"),
    State("aborted backward", "pinned", (*_TRAINED, _failed_backward), "DK604"),
)
