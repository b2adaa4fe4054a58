"""The operations that are tried, and how it is told whether each did what it should.

An operation returns the `Cell` of what happened when it did not raise; what it raises is turned into a cell by
`attempt`.
Silent faults are found by looking: did values arrive, did gradients arrive, where is the result.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diagkit.demo.predictions.bench import Bench
from diagkit.diagnosis.predictions.lookup import OPERATIONS, Cell
from diagkit.diagnosis.signatures import said

OK = Cell("ok")


class Blocked(Exception):
    """The operation is not reached: the forward or backward pass before it fails."""


def attempt(bench: Bench, operation: str) -> Cell:
    """Does the operation, really, and says what came of it."""
    try:
        return _OPERATIONS[operation](bench)
    except Blocked as blocked:
        return Cell("blocked", _error(blocked.__cause__ or blocked))
    except Exception as error:
        return Cell("crash", _error(error))


def _error(error: BaseException) -> str:
    names = sorted(said(str(error)))
    return names[0] if names else " ".join(f"{type(error).__name__}: {error}".split())[:100]


def _parameters(bench: Bench) -> Iterator[Tensor]:
    return iter(bench.optimizer.param_groups[0]["params"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _values(bench: Bench) -> list[Tensor]:
    # full_tensor would need the very collective under test; to_local works in every state that has bytes.
    return [_local(p).detach().cpu().clone() for p in _parameters(bench) if not p.is_meta]


def _with_gradients(bench: Bench) -> None:
    """Runs a backward pass where there are no gradients, since a step or a norm of none would prove nothing."""
    if any(p.grad is not None for p in _parameters(bench)):
        return
    try:
        bench.loss().backward()
    except Exception as error:
        raise Blocked from error


def _apart(tensors: dict[str, Tensor]) -> bool:
    """Whether a tensor's metadata and bytes are on different devices."""
    return any(isinstance(t, DTensor) and t.device.type != t.to_local().device.type for t in tensors.values())


def _detached(bench: Bench) -> bool:
    """Whether what is trained is not what is gathered, or what is gathered is old, by the recorder's own facts."""
    from diagkit.capture import snapshot
    from diagkit.trace.schema import Residency

    rank = snapshot(bench.model, bench.optimizer)
    facts = [rank.facts[n] for n in rank.state(-1).facts]
    apart = any(isinstance(f, Residency) and f.aliased is False and not f.empty for f in facts)
    return apart or bench.facets().parameters == "stale"


def _state_dict(bench: Bench) -> Cell:
    state = bench.model.state_dict()
    return Cell("silent", "on cpu") if _apart(state) else OK


def _get_model_state_dict(bench: Bench) -> Cell:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = {name: v for name, v in get_model_state_dict(bench.model).items() if isinstance(v, Tensor)}
    return Cell("silent", "on cpu") if _apart(state) else OK


def _load_state_dict(bench: Bench) -> Cell:
    if not bench.weights:
        bench.weights = {name: torch.ones_like(value, device="cpu") for name, value in bench.model.state_dict().items()}
    bench.model.load_state_dict(bench.weights)
    if any(p.is_meta for p in _parameters(bench)):
        return Cell("silent", "nothing arrives")
    wanted = {name: _local(value).cpu() for name, value in bench.weights.items()}
    live = dict(bench.model.named_parameters())
    if any(not torch.equal(_local(live[name]).detach().cpu(), value) for name, value in wanted.items() if name in live):
        return Cell("silent", "nothing arrives")
    return Cell("silent", "stale") if _detached(bench) else OK


def _load_optimizer(bench: Bench) -> Cell:
    if not bench.moments:
        bench.moments = bench.optimizer.state_dict()
    bench.optimizer.load_state_dict(bench.moments)
    for parameter, state in bench.optimizer.state.items():
        if _local(parameter).device.type != _local(state["exp_avg"]).device.type:
            return Cell("silent", "lands apart")
    return OK


def _forward(bench: Bench) -> Cell:
    with torch.no_grad():
        before = float(bench.loss())
        bench.model.reshard()  # type: ignore[operator]
        if float(bench.loss()) != before:
            return Cell("silent", "stale")
        bench.model.reshard()  # type: ignore[operator]
        for parameter in bench.model.parameters():  # the optimizer's may be others
            _local(parameter).mul_(1.25)
        after = float(bench.loss())
    return Cell("silent", "stale") if _some_stale(bench, before == after) else OK


def _some_stale(bench: Bench, nothing_changed: bool) -> bool:
    # One child among many may be stale while the loss moves with the others.
    return nothing_changed or _detached(bench)


def _backward(bench: Bench) -> Cell:
    try:
        loss = bench.loss()
    except Exception as error:
        raise Blocked from error
    for parameter in _parameters(bench):
        parameter.grad = None
    loss.backward()
    for parameter in _parameters(bench):
        if parameter.requires_grad and parameter.grad is None:
            return Cell("silent", "no gradient")
        if parameter.grad is not None and _local(parameter.grad).device.type != _local(parameter).device.type:
            return Cell("silent", "lands apart")
    return OK


def _step(bench: Bench) -> Cell:
    _with_gradients(bench)
    before = _values(bench)
    had = any(p.grad is not None for p in _parameters(bench))
    bench.optimizer.step()
    changed = any(not torch.equal(a, b) for a, b in zip(before, _values(bench), strict=True))
    if not changed:
        return Cell("silent", "nothing arrives" if had else "no gradient")
    return Cell("silent", "stale") if _detached(bench) else OK


def _clip(bench: Bench) -> Cell:
    _with_gradients(bench)
    if all(p.grad is None for p in _parameters(bench)):
        return Cell("silent", "no gradient")
    norm = torch.nn.utils.clip_grad_norm_(list(_parameters(bench)), 1.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    float(norm)
    return OK


def _full_tensor(bench: Bench) -> Cell:
    places = {p.full_tensor().device.type for p in _parameters(bench) if isinstance(p, DTensor)}
    return Cell("ok", "on cpu") if places == {"cpu"} else OK


def _to_device(bench: Bench) -> Cell:
    bench.model.to(bench.device)
    found = bench.facets().parameters
    if found == "split":
        return Cell("silent", "splits")
    return Cell("silent", "moves") if found in ("moved", "past reset") else _rest(found)


def _rest(found: str) -> Cell:
    return OK if found in ("home", "parked") else Cell("silent", "stays broken")


def _to_cpu(bench: Bench) -> Cell:
    buffers = bench.facets().buffers
    bench.model.to("cpu")
    found = bench.facets()
    if found.parameters not in ("home", "parked"):
        return Cell("silent", "stays broken")
    return Cell("ok", "drags buffers") if buffers == "home" and found.buffers == "cpu" else OK


def _export(bench: Bench) -> Cell:
    places = set()
    for value in bench.model.state_dict().values():
        moved = value.to(bench.device)
        places.add((moved.full_tensor() if isinstance(moved, DTensor) else moved).device.type)
    return OK if places == {bench.device} else Cell("silent", "on cpu")


def _save(bench: Bench) -> Cell:
    content = {"model": bench.model.state_dict(), "optimizer": bench.optimizer.state_dict()}
    file = io.BytesIO()
    torch.save({name: _local(value) for name, value in content["model"].items()}, file)
    torch.save(content["optimizer"], file)
    return OK


_OPERATIONS: dict[str, Callable[[Bench], Cell]] = dict(
    zip(
        OPERATIONS,
        (
            _state_dict,
            _get_model_state_dict,
            _load_state_dict,
            _load_optimizer,
            _forward,
            _backward,
            _step,
            _clip,
            _full_tensor,
            _to_device,
            _to_cpu,
            _export,
            _save,
        ),
        strict=True,
    )
)
