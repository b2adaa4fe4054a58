"""The VeOmni engine's life: a subclass of the FSDP engine that builds, guards and exports in its own way.

Rules of this module: as in `fsdp.py`, every condition of the fix's history is one ``self.has(GUARD)``. What is
inherited is inherited on purpose, because that is where the flag goes missing: ``__init__`` does **not** call its
parent's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from diagkit.lab.engines import guards
from diagkit.lab.engines.checkpoint import CheckpointManager
from diagkit.lab.engines.config import EngineConfig
from diagkit.lab.engines.fsdp import FSDPEngine
from diagkit.lab.engines.guards import Revision
from diagkit.lab.engines.moves import offload_veomni_model_to_cpu
from diagkit.lab.models import TinyDecoder, source_weights

__all__ = ["VeOmniEngine"]


class VeOmniEngine(FSDPEngine):
    """verl's VeOmni engine, small; the same operations as :class:`~diagkit.lab.engines.fsdp.FSDPEngine`.

    Follows veomni 0.1.11 in where buffers rest (the CPU), and unlike it accepts a world size of 1.
    """

    def __init__(self, config: EngineConfig, revision: Revision, device: str = "npu") -> None:
        # No super().__init__(): whatever the parent sets there, this engine does not have.
        self.config = config
        self.revision = revision
        self.device = device
        # Straight from the configuration, policy or not: nothing here ever forces them to False.
        self._is_offload_param = config.param_offload
        self._is_offload_optimizer = config.optimizer_offload
        if self.has(guards.VEOMNI_POLICY_SETS_FLAG):
            self._uses_fsdp2_cpu_offload_policy = config.offload_policy

    # ---- guards ------------------------------------------------------------------------------------------------------

    def _save_moves_model(self) -> bool:
        first_parameter_on_cpu = next(self.module.parameters()).device.type == "cpu"
        moves = self._is_offload_param or first_parameter_on_cpu
        if self.has(guards.VEOMNI_SAVE_ASKS_FLAG):
            moves = moves and not self._fsdp_owns_the_device()
        return moves

    def _load_moves_model(self) -> bool:
        moves = self._is_offload_param
        if self.has(guards.VEOMNI_LOAD_ASKS_FLAG):
            moves = moves and not self._fsdp_owns_the_device()
        return moves

    def _export_moves_model(self) -> bool:
        moves = True
        if self.has(guards.VEOMNI_EXPORT_ASKS_FLAG):
            moves = moves and not self._fsdp_owns_the_device()
        return moves

    def _export_offloads_model(self) -> bool:
        return self._is_offload_param

    def _exported(self, tensor: Tensor) -> Tensor:
        if self.has(guards.VEOMNI_EXPORT_STAGES):
            tensor = tensor.to(self.device)
        # Without that line a policy parameter is gathered on the CPU: it needs a CPU backend, and stays there.
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    # ---- construction ------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build on meta, shard, materialise on the CPU, copy the weights in: no whole-model move at all."""
        self.module = self._build_module()
        self._build_optimizer()
        self.checkpoint_manager = CheckpointManager(self.module, self.optimizer, self.lr_scheduler, self.device)
        self.to(
            "cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_optimizer
        )

    def _build_module(self) -> nn.Module:
        with torch.device(self.config.init_device or "meta"):
            module = TinyDecoder(self.config.model)
        offload = self.config.offload_policy
        policy = CPUOffloadPolicy(pin_memory=self.config.pin_memory) if offload else OffloadPolicy()
        for part in (*module.model.layers, module):
            fully_shard(part, mesh=self.mesh, offload_policy=policy)
        module.to_empty(device="cpu" if offload else self.device)
        module.tie_weights()
        shards, shard = self.mesh.size(-1), self.mesh.get_local_rank(self.mesh.ndim - 1)
        weights = source_weights(self.config.model, self.config.seed)
        for name, parameter in module.named_parameters():
            _copy_shard(parameter, weights[name], shards, shard)
        module.reset_buffers()
        return module

    # ---- parts that differ from the FSDP engine's ------------------------------------------------------------------

    def _offload_model(self) -> None:
        offload_veomni_model_to_cpu(self.module, self.device)

    def _clip_gradients(self) -> Tensor:
        """VeOmni attaches a clip of its own, which sums the norms on the accelerator: it needs no CPU backend."""
        gradients = [p.grad.to_local() for p in self.module.parameters() if isinstance(p.grad, DTensor)]
        square = torch.zeros((), device=self.device)
        for gradient in gradients:
            square += gradient.square().sum().to(self.device)
        dist.all_reduce(square, group=self.mesh.get_group(self.mesh.ndim - 1))
        norm = square.sqrt()
        scale = float((self.config.max_norm / (norm + 1e-6)).clamp(max=1.0))
        for gradient in gradients:
            gradient.mul_(scale)
        return norm


@torch.no_grad()
def _copy_shard(parameter: Tensor, full: Tensor, shards: int, shard: int) -> None:
    """Copy this rank's rows in place. FSDP2 shards axis 0 as ``torch.chunk`` does: the last ranks may have none."""
    chunks = full.chunk(shards)
    if shard < len(chunks):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(chunks[shard])
