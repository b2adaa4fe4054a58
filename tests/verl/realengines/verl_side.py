"""verl's engines without Ray: a tiny random Qwen2 on disk, the engines' own configuration classes, a batch, a loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from realengines.cells import OFFLOADS, Cell

VOCABULARY = 64
SEQUENCES = ((5, 9, 3, 7, 2), (4, 8, 1), (6, 6, 2, 9, 9, 1), (3, 3))


def write_model(folder: Path) -> None:
    """Save a Qwen2 with two layers and random weights in Hugging Face's format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_engine(cell: Cell, model: Path) -> Any:
    """Construct the cell's engine as verl's workers do, uninitialised; the process group must be up."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config as configs

    model_config = configs.HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    common: dict[str, Any] = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_torch_compile": False,
        "use_remove_padding": False,
        **OFFLOADS[cell.offload],
    }
    optimizer: dict[str, Any] = {"lr": 1e-2, "total_training_steps": 10, "lr_warmup_steps_ratio": 0.0}
    if cell.engine == "fsdp":
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as Engine

        engine_config = configs.FSDPEngineConfig(strategy="fsdp2", **common)
        optimizer_config = configs.FSDPOptimizerConfig(**optimizer)
    else:
        from verl.workers.engine.veomni.transformer_impl import VeOmniEngineWithLMHead as Engine

        common["enable_fsdp_offload"] = common.pop("offload_policy", False)
        engine_config = configs.VeOmniEngineConfig(
            attn_implementation="eager",
            moe_implementation="eager",
            enable_full_shard=True,
            mixed_precision=True,
            **common,
        )
        optimizer_config = configs.VeOmniOptimizerConfig(**optimizer)
    return Engine(model_config, engine_config, optimizer_config, CheckpointConfig())


def make_batch(rank: int) -> Any:
    """Four short sequences, packed as verl packs them; other tokens on each rank."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    rows = [(torch.tensor(sequence) + 11 * rank) % VOCABULARY for sequence in SEQUENCES]

    def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": jagged(rows),
            "position_ids": jagged([torch.arange(len(row)) for row in rows]),
            "loss_mask": jagged([torch.ones(len(row), dtype=torch.long) for row in rows]),
            "temperature": torch.ones(len(rows)),
        },
        {
            "use_remove_padding": False,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "pad_token_id": 2,
        },
    )


def train_step(engine: Any, rank: int) -> float:
    """One step through the engine's own context manager and batch method; return the sum of the losses."""
    with engine.train_mode():
        output = engine.train_batch(make_batch(rank), loss_function)
    return float(sum(output["loss"]))


def write_checkpoint(engine: Any, folder: Path) -> None:
    """Write a checkpoint through the engine's checkpoint manager, past the engine's own moves."""
    engine.checkpoint_manager.save_checkpoint(str(folder))


def exported(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a weight synchronisation is given, tensor by tensor."""
    return engine.get_per_tensor_param()[0]


def source_weights(model: Path) -> dict[str, torch.Tensor]:
    """The weights that the engine was built from."""
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mean negative log-probability of the batch."""
    return -model_output["log_probs"].values().mean(), {}
