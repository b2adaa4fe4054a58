"""Jobs as people write them, each healthy and each with something that a rule could take for a fault.

A job is built on the ranks of the running process group; `live` leads it through two steps, a save, an evaluation, a
load and one more step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from diagkit.demo.predictions.bench import DECODER, Bench, buffers_to, build
from diagkit.demo.predictions.models import Decoder

if TYPE_CHECKING:
    from healthy_ranks import Watch


@dataclass
class Job:
    """``watched``: a model, or several by name. ``others``: optimizers beside the bench's own."""

    bench: Bench
    watched: Any = None
    others: list[torch.optim.Optimizer] = field(default_factory=list)
    passes: int = 1

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.bench.optimizer, *self.others]

    def step(self) -> None:
        bench = self.bench
        for last in (n == self.passes for n in range(1, self.passes + 1)):
            if self.passes > 1:
                for module in (*bench.kind.parts(bench.model), bench.model):
                    module.set_reshard_after_backward(last)  # type: ignore[operator]
                bench.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            bench.loss().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def live(watch: Watch, job: Job) -> None:
    """The job's life. Live looks are taken where nothing is under way."""
    model, watched = job.bench.model, job.watched or job.bench.model
    watch.begin(watched, job.optimizers)
    with watch.phase("train"):
        job.step()
        job.step()
    watch.look("trained", watched, job.optimizers)
    with watch.phase("save"):
        saved = model.state_dict()
        for optimizer in job.optimizers:
            optimizer.state_dict()
    with watch.phase("eval"), torch.no_grad():
        job.bench.loss()
    watch.look("evaluated", watched, job.optimizers)
    with watch.phase("load"):
        model.load_state_dict({name: value.clone() for name, value in saved.items()})
    with watch.phase("train"):
        job.step()
    watch.look("loaded", watched, job.optimizers)


JOBS: dict[str, Callable[[], Job]] = {}


def job(function: Callable[[], Job]) -> Callable[[], Job]:
    JOBS[function.__name__] = function
    return function


def _sharded(model: nn.Module, parts: list[nn.Module], **options: Any) -> None:
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(), **options)
    buffers_to(model, "npu")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@job
def gradient_accumulation() -> Job:
    return Job(build(DECODER, "pinned"), passes=3)


@job
def activation_checkpointing() -> Job:
    def make() -> nn.Module:
        model = Decoder()
        model.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in model.layers])
        return model

    return Job(build(replace(DECODER, make=make), "pinned"))


@job
def frozen_parameters() -> Job:
    """An optimizer that knows fewer parameters than the model has."""

    def make() -> nn.Module:
        model = Decoder()
        model.embed.requires_grad_(False)
        return model

    bench = build(replace(DECODER, make=make), "pinned")
    bench.optimizer = _adamw(p for p in bench.model.parameters() if p.requires_grad)
    return Job(bench)


@job
def a_part_is_trained() -> Job:
    """As with adapters: an optimizer for some of what wants gradients."""
    bench = build(DECODER, "pinned")
    bench.optimizer = _adamw(bench.model.get_submodule("head").parameters())
    return Job(bench)


@job
def several_optimizers() -> Job:
    bench = build(DECODER, "pinned")
    matrices = [p for p in bench.model.parameters() if p.dim() > 1]
    bench.optimizer = _adamw(p for p in bench.model.parameters() if p.dim() == 1)
    return Job(bench, others=[torch.optim.SGD(matrices, lr=0.01, momentum=0.9)])


@job
def tied_embeddings() -> Job:
    def make() -> nn.Module:
        model = Decoder()
        model.head.weight = model.embed.weight
        return model

    return Job(build(replace(DECODER, make=make), "pinned"))


@job
def mixed_precision() -> Job:
    model = Decoder()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _sharded(model, DECODER.parts(model), mp_policy=precision)
    return Job(Bench(model, _adamw(model.parameters()), DECODER, "npu"))


@job
def groups_of_other_dtypes() -> Job:
    """One layer in half precision, cast before and the whole cast back after wrapping."""
    model = Decoder()
    DECODER.parts(model)[0].bfloat16()
    _sharded(model, DECODER.parts(model))
    model.float()
    return Job(Bench(model, _adamw(model.parameters()), DECODER, "npu"))


@job
def another_model_and_its_optimizer() -> Job:
    """A critic of the same shapes, sharded and trained; only the actor is watched, with both optimizers."""
    actor, critic = build(DECODER, "pinned"), build(DECODER, "pinned")
    for p in actor.model.get_submodule("embed").parameters():
        p.requires_grad_(True)
    actor.optimizer = _adamw(p for n, p in actor.model.named_parameters() if not n.startswith("embed"))
    actor.optimizer.critic = critic  # type: ignore[attr-defined]  # alive as long as the job
    critic.loss().backward()
    return Job(actor, others=[critic.optimizer])


@job
def actor_and_reference() -> Job:
    """A reference without the policy beside an actor under it: two models, each of one mind."""
    actor, reference = build(DECODER, "pinned"), build(DECODER, "none")
    return Job(actor, watched={"actor": actor.model, "reference": reference.model})


@job
def loaded_by_assignment_first() -> Job:
    bench = build(DECODER, "pinned")
    bench.model.load_state_dict({n: v.clone() for n, v in bench.model.state_dict().items()}, assign=True)
    bench.optimizer = _adamw(bench.model.parameters())
    return Job(bench)


@job
def loaded_by_broadcast() -> Job:
    bench = build(DECODER, "pinned")
    whole = get_model_state_dict(bench.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    set_model_state_dict(bench.model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return Job(bench)


@job
def ignored_parameters() -> Job:
    """A bias that FSDP2 is told to leave alone, on the accelerator where it is used."""
    model = Decoder()
    model.head.bias = nn.Parameter(torch.zeros(37, device="npu"))
    _sharded(model, DECODER.parts(model), ignored_params={model.head.bias})
    return Job(Bench(model, _adamw(model.parameters()), DECODER, "npu"))


@job
def fsdp1_flat() -> Job:
    """FSDP1 with one flat parameter a module."""
    with torch.device("npu"):
        inner = Decoder()
    model = FullyShardedDataParallel(inner, device_id=torch.device("npu", dist.get_rank()))
    return Job(Bench(model, _adamw(model.parameters()), DECODER, "npu"))


class Wrapped(Tensor):
    """A shard in a wrapper of its own, as low-bit and float8 weights are: it claims bfloat16 and holds float32."""

    _held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        size, strides = held.size(), held.stride()
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return, attr-defined]
            cls, size, strides=strides, dtype=torch.bfloat16, device=held.device, requires_grad=held.requires_grad
        )

    def __init__(self, held: Tensor) -> None:
        self._held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Wrapped:
        return Wrapped(inner["_held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t._held, (args, kwargs or {}))
        kwargs.pop("dtype", None)
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self._held,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (gathered[0].to(dtype), gathered)
