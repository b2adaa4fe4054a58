"""One training step recorded in full detail; what the process itself measures is written beside the trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import recorder_world as world
import torch
import torch.distributed as dist

import diagkit as dk


def main(folder: str) -> None:
    rank = world.begin()
    model = world.sharded(tie=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with dk.record(model, optimizer, out=Path(folder) / "trace", detail="full") as recorder, recorder.phase("train"):
        world.train_step(model, optimizer)
    parameters = {id(p): p._local_tensor for p in model.parameters()}  # a tied one comes once
    measured = {
        "parameters": sum(t.numel() * t.element_size() for t in parameters.values()),
        "states": sum(
            local.numel() * local.element_size()
            for state in optimizer.state.values()
            for value in state.values()
            for local in [getattr(value, "_local_tensor", value)]
        ),
        "whole": {name: p.numel() * p.element_size() for name, p in model.named_parameters()},
        "tied": sorted(name for name, p in model.named_parameters(remove_duplicate=False) if p is model.lm_head.weight),
    }
    (Path(folder) / f"measured-{rank}.json").write_text(json.dumps(measured))
    world.end()


if __name__ == "__main__":
    assert not dist.is_initialized()
    main(sys.argv[1])
