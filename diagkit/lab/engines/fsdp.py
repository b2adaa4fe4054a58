"""The FSDP engine's life: construction, train, save, load, export, and the manual moves between them.

Rules of this module: the order of steps is the field's, because the order is the bug; every condition that a revision
of the fix added is one ``self.has(GUARD)`` in the section "guards" of the class, and nothing else depends on the
revision. Read `_save_moves_model` first: its `before` form is verl #5995.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from diagkit.errors import EngineError
from diagkit.lab.engines import guards
from diagkit.lab.engines.checkpoint import CheckpointManager
from diagkit.lab.engines.config import EngineConfig
from diagkit.lab.engines.guards import Guard, Revision
from diagkit.lab.engines.modes import EvalMode, TrainMode
from diagkit.lab.engines.moves import (
    load_model_to_device,
    load_optimizer,
    offload_model_to_cpu,
    offload_optimizer,
)
from diagkit.lab.models import TinyDecoder, source_weights

__all__ = ["FSDPEngine"]


class FSDPEngine:
    """verl's FSDP engine, small: ``initialize()``, then ``save_checkpoint``, ``load_checkpoint``,
    ``get_per_tensor_param``, ``train_mode()`` with ``train_batch()``, and the manual ``to()``.

    The process group must exist before ``initialize()``. ``device`` is the accelerator's type (``npu``, ``cuda``); with
    ``cpu`` there is no accelerator and no split (pass ``pin_memory=False`` then).
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    checkpoint_manager: CheckpointManager
    mode: str | None = None

    def __init__(self, config: EngineConfig, revision: Revision, device: str = "npu") -> None:
        self.config = config
        self.revision = revision
        self.device = device
        self._is_offload_param = config.param_offload
        self._is_offload_optimizer = config.optimizer_offload
        if self.has(guards.FSDP_FLAG_STARTS_FALSE):
            self._uses_fsdp2_cpu_offload_policy = False

    # ---- guards: what the history of the fix changed, one place each -------------------------------------------------

    def has(self, guard: Guard) -> bool:
        """Whether this engine's revision contains the condition."""
        return self.revision.has(guard)

    def _fsdp_owns_the_device(self) -> bool:
        if self.has(guards.FLAG_HAS_DEFAULT):
            # A subclass whose __init__ does not call ours has no such attribute: VeOmni's engine is one.
            return getattr(self, "_uses_fsdp2_cpu_offload_policy", False)
        return self._uses_fsdp2_cpu_offload_policy

    def _take_the_policy(self) -> None:
        if self.has(guards.FSDP_POLICY_CLEARS_FLAGS):
            self._is_offload_param = False
            self._is_offload_optimizer = False
        if self.has(guards.FSDP_POLICY_SETS_FLAG):
            self._uses_fsdp2_cpu_offload_policy = True

    def _save_moves_model(self) -> bool:
        first_parameter_on_cpu = next(self.module.parameters()).device.type == "cpu"
        moves = self._is_offload_param or first_parameter_on_cpu
        if self.has(guards.FSDP_SAVE_ASKS_FLAG):
            moves = moves and not self._fsdp_owns_the_device()
        return moves

    def _load_moves_model(self) -> bool:
        return self._is_offload_param

    def _export_moves_model(self) -> bool:
        moves = True
        if self.has(guards.FSDP_EXPORT_ASKS_FLAG):
            # Read without a default to this day: no subclass has come to share this method.
            moves = not self._uses_fsdp2_cpu_offload_policy
        if self.has(guards.FSDP_EXPORT_IN_PLACE):
            moves = moves and self._has_lora()
        return moves

    def _export_offloads_model(self) -> bool:
        offloads = self._is_offload_param
        if self.has(guards.FSDP_EXPORT_LEAVES_IN_PLACE):
            offloads = offloads and self._has_lora()
        return offloads

    def _exported(self, tensor: Tensor) -> Tensor:
        # On a split DTensor this `.to` does nothing (its wrapper is on the device already): the result is on the CPU.
        tensor = tensor.to(self.device)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.to(torch.bfloat16)

    # ---- construction ------------------------------------------------------------------------------------------------

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks. Made at first use, so that an engine can be asked for its guards without a process group."""
        return _device_mesh(self.device, self.config.replicas)

    def initialize(self) -> None:
        """Build the sharded module, optimizer, scheduler and checkpoint manager, then offload what the flags name."""
        self.module = self._build_module()
        self._build_optimizer()
        self.checkpoint_manager = CheckpointManager(self.module, self.optimizer, self.lr_scheduler, self.device)
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    def _build_module(self) -> nn.Module:
        with torch.device(self.config.init_device or ("cpu" if dist.get_rank() == 0 else "meta")):
            module = TinyDecoder(self.config.model)
        if dist.get_rank() == 0:
            module.load_state_dict(source_weights(self.config.model, self.config.seed))
        policy = OffloadPolicy()
        if self.config.offload_policy or self.config.forward_only:
            self._take_the_policy()
            policy = CPUOffloadPolicy(pin_memory=self.config.pin_memory)
        full_state = module.state_dict()
        for part in _parts_to_shard(module):
            fully_shard(part, mesh=self.mesh, offload_policy=policy)
        self._load_full_state(module, full_state, offload=isinstance(policy, CPUOffloadPolicy))
        return module

    def _load_full_state(self, module: nn.Module, full_state: dict[str, Tensor], offload: bool) -> None:
        """Give every rank its shards of rank 0's weights.

        The move to the device splits every parameter under the policy and the move back heals them: this moment exists
        at every revision, fixed ones included, and is no fault.
        """
        if dist.get_rank() == 0:
            module.to(self.device)
        else:
            module.to_empty(device=self.device)
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload, broadcast_from_rank0=True)
        set_model_state_dict(module, dict(full_state), options=options)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        if offload:
            module.to("cpu")
            for buffer in module.buffers():
                buffer.data = buffer.data.to(self.device)

    def _build_optimizer(self) -> None:
        self.optimizer, self.lr_scheduler = None, None
        if not self.config.forward_only:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=self.config.lr)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def _has_lora(self) -> bool:
        return self.config.model.lora_rank > 0

    # ---- operations --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write a sharded checkpoint; all ranks together."""
        if self._save_moves_model():
            self._load_model()
        self.checkpoint_manager.save(folder)
        dist.barrier()
        if self._is_offload_param:
            self._offload_model()

    def load_checkpoint(self, folder: str | Path) -> None:
        """Read a sharded checkpoint back; all ranks together."""
        if self._load_moves_model():
            self._load_model()
        self.checkpoint_manager.load(folder)
        dist.barrier()
        if self._is_offload_param:
            self._offload_model()
        if self._is_offload_optimizer and self.optimizer is not None:
            offload_optimizer(self.optimizer)

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, for weight synchronisation, made one at a time while the caller iterates.

        The generator works on aliases of the **live** parameters: consume it before the next step or load.
        """
        if self._export_moves_model():
            self._load_model()
        state = self.module.state_dict()
        if self._export_offloads_model():
            self._offload_model()
        return ((name, self._exported(tensor)) for name, tensor in state.items())

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move model and optimizer by hand, whatever the policy says (gradients travel with the model)."""
        if device not in (self.device, "cpu"):
            raise EngineError("cannot move the engine", found=device, expected=f"{self.device} or cpu")
        if model:
            self._load_model() if device == self.device else self._offload_model()
        if optimizer and self.optimizer is not None:
            load_optimizer(self.optimizer, device) if device == self.device else offload_optimizer(self.optimizer)

    def train_mode(self) -> TrainMode:
        """Context for training: loads what the offload flags name, and offloads it again."""
        return TrainMode(self)

    def eval_mode(self) -> EvalMode:
        """Context for inference: loads what the offload flags name, reshards and offloads at its end."""
        return EvalMode(self)

    def train_batch(self, step: int = 0) -> float:
        """One optimizer step on made-up tokens: zero, micro-batches, clip, step if finite; returns the mean loss."""
        if self.optimizer is None:
            raise EngineError("a forward-only engine cannot train", remedy="Build it with forward_only=False")
        self.optimizer_zero_grad()
        losses = []
        for micro_batch in range(self.config.micro_batches):
            loss = self._loss(self._tokens(step, micro_batch)) / self.config.micro_batches
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        if torch.isfinite(self._clip_gradients()):
            self.optimizer.step()
        else:
            self.optimizer_zero_grad()
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def infer_batch(self, step: int = 0) -> float:
        """The loss of one made-up micro-batch, without gradients."""
        return float(self._loss(self._tokens(step, 0)))

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def reshard(self) -> None:
        """Free unsharded parameters."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    # ---- parts that the VeOmni engine replaces ---------------------------------------------------------------------

    def _load_model(self) -> None:
        load_model_to_device(self.module, self.device)

    def _offload_model(self) -> None:
        offload_model_to_cpu(self.module, self.device)

    def _clip_gradients(self) -> Tensor:
        # The norm of gradients under the policy is a CPU DTensor: summing it over ranks needs a CPU backend (DK402).
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _tokens(self, step: int, micro_batch: int) -> Tensor:
        # Made on the CPU and moved, so that every device trains on the same numbers.
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + dist.get_rank())
        shape = (self.config.batch, self.config.length)
        return torch.randint(0, self.config.model.vocab, shape, generator=generator).to(self.device)

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self.module(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _device_mesh(device: str, replicas: int) -> DeviceMesh:
    world_size = dist.get_world_size()
    if world_size % replicas:
        raise EngineError(
            "the ranks cannot be split into replicas",
            found=f"{world_size} ranks, {replicas} replicas",
            remedy="Choose a number of replicas that divides the number of ranks",
        )
    if replicas == 1:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device, (replicas, world_size // replicas), mesh_dim_names=("ddp", "fsdp"))


def _parts_to_shard(module: TinyDecoder) -> list[nn.Module]:
    """Embedding and head (unless tied: sharding them apart would part them), each layer, the root last."""
    ends: list[nn.Module] = [] if module.config.tie else [module.model.embed_tokens, module.lm_head]
    return [*ends, *module.model.layers, module]
