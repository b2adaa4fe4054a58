"""What the ranks of `test_engines.py` do: many cells in one process each, and checkpoints compared value by value.

Every cell builds an engine of its own, so one that failed leaves nothing to the next; that this holds in one process is
itself checked, by comparing the unmutated cells with the table of expected outcomes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diagkit.demo import cell as cells
from diagkit.demo.evidence import evidence
from diagkit.demo.experiments import Experiment
from diagkit.lab import simulate
from diagkit.lab.engines import EngineConfig, FSDPEngine, build_engine, revision
from diagkit.lab.engines.guards import FSDP_EXPORT_IN_PLACE, FSDP_EXPORT_LEAVES_IN_PLACE
from diagkit.lab.models import DecoderConfig, source_weights
from diagkit.trace import open_trace

SMALL = DecoderConfig(layers=1)


def start(group: str = "cpu:gloo,npu:hccl") -> int:
    simulate()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group(group)
    return rank


def run_cells(plan: str, group: str, out: str) -> None:
    """Run the cells of a plan (a JSON list of the fields of Experiment); rank 0 writes what each did beside it."""
    rank = start(group)
    cells.MODEL = SMALL
    folder = Path(out)
    found: list[dict[str, Any]] = []
    prepared: set[Path] = set()
    for number, fields in enumerate(json.loads(Path(plan).read_text())):
        experiment = Experiment(**{**fields, "without": tuple(fields["without"])})
        checkpoint = cells.checkpoint_folder(folder, experiment)
        if experiment.operation == "load" and checkpoint not in prepared:
            cells.run_preparation(experiment, folder, "npu")
            prepared.add(checkpoint)
        record = cells.run_cell(experiment, folder / str(number), "npu", checkpoint)
        seen = evidence(open_trace(cells.trace_folder(folder / str(number), experiment))[rank], experiment.operation)
        found.append({**record, "moves": list(seen.moves)})
        dist.barrier()
    if rank == 0:
        Path(plan).with_suffix(".found.json").write_text(json.dumps(found))


def check_values() -> None:
    """Train, save, train on, load: parameters and optimizer state come back bit for bit. Then odd models and meshes."""
    start()
    folder = Path(os.environ["FOLDER"])
    for name in ("fsdp", "veomni"):
        for flags in ("policy", "manual"):
            engine = build_engine(name, "current", cells.config_of(flags, "npu"), "npu")
            _round_trip(engine, folder / f"{name}-{flags}")
    for changes in ({"tie": True}, {"lora_rank": 2}, {"vocab": 33, "hidden": 8, "intermediate": 5}):
        model = replace(SMALL, **changes)
        for name in ("fsdp", "veomni"):
            engine = build_engine(name, "current", EngineConfig(model=model), "npu")
            _export_equals_source(engine)
            _round_trip(engine, folder / f"{name}-{'-'.join(changes)}")
    _replicas(folder)
    _lora_and_the_export_of_7005()


def _round_trip(engine: FSDPEngine, folder: Path) -> None:
    with engine.train_mode():
        engine.train_batch(0)
    engine.save_checkpoint(folder)
    saved = list(_values(engine))
    assert any(".exp_avg" in name for name, _ in saved), "the optimizer has state"
    with engine.train_mode():
        engine.train_batch(1)
    assert not all(torch.equal(now, then) for (_, now), (_, then) in zip(_values(engine), saved, strict=True))
    engine.load_checkpoint(folder)
    for (name, now), (_, then) in zip(_values(engine), saved, strict=True):
        assert torch.equal(now, then), name
    # Two engines that continue from one checkpoint take the same step.
    with engine.train_mode():
        first = engine.train_batch(2)
    engine.load_checkpoint(folder)
    with engine.train_mode():
        assert engine.train_batch(2) == first


def _values(engine: FSDPEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's own values, copied: parameters, and every tensor of the optimizer's state."""
    assert engine.optimizer is not None
    for name, parameter in engine.module.named_parameters():
        yield name, parameter.to_local().detach().cpu().clone()
        for part, value in engine.optimizer.state.get(parameter, {}).items():
            local = value.to_local() if hasattr(value, "to_local") else value
            yield f"{name}.{part}", local.detach().cpu().clone()


def _export_equals_source(engine: FSDPEngine) -> None:
    source = source_weights(engine.config.model, engine.config.seed)
    exported = dict(engine.get_per_tensor_param())
    assert exported.keys() == source.keys()
    for name, tensor in exported.items():
        assert tensor.device.type == "npu", name
        assert torch.equal(tensor.cpu(), source[name].to(tensor.dtype)), name


def _replicas(folder: Path) -> None:
    """A mesh of replicas x shards (here 2 x 1) lives the same life, and the bug with it."""
    for name in ("fsdp", "veomni"):
        engine = build_engine(name, "current", EngineConfig(model=SMALL, replicas=2), "npu")
        assert engine.mesh.mesh_dim_names == ("ddp", "fsdp")
        _export_equals_source(engine)
        _round_trip(engine, folder / f"{name}-replicas")
        try:
            build_engine(name, "before", EngineConfig(model=SMALL, replicas=2), "npu").save_checkpoint(folder / "never")
        except RuntimeError as error:
            assert "Attempted to set the storage" in str(error)
        else:
            raise AssertionError("the save before the fix worked")


def _lora_and_the_export_of_7005() -> None:
    """#7005 asks for an adapter: with one, and without the policy, export moves the model and offloads it again."""
    manual = EngineConfig(model=SMALL, offload_policy=False, param_offload=True, optimizer_offload=True)
    with_lora = replace(manual, model=replace(SMALL, lora_rank=2))
    code = revision("#7005")
    for config, wanted in ((manual, (False, False)), (with_lora, (True, True))):
        engine = build_engine("fsdp", code, config, "npu")
        assert (engine._export_moves_model(), engine._export_offloads_model()) == wanted
        _export_equals_source(engine)
        assert all(parameter.device.type == "cpu" for parameter in engine.module.parameters())
    bare = build_engine("fsdp", code.without(FSDP_EXPORT_IN_PLACE, FSDP_EXPORT_LEAVES_IN_PLACE), manual, "npu")
    assert bare._export_moves_model() and bare._export_offloads_model()
