"""A training job that goes wrong in one of several ways, for the logs in this folder: ``torchrun ... job.py WAY``."""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from diagkit.demo.predictions.bench import DECODER, STRAIGHT, Bench, buffers_to, build
from diagkit.lab import simulate


def start(backend: str = "cpu:gloo,npu:hccl") -> None:
    simulate(announce=False)
    torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # type: ignore[attr-defined]
    dist.init_process_group(backend)


def load_model_to_device(module: nn.Module) -> None:
    module.to("npu")


def save_checkpoint(bench: Bench) -> None:
    load_model_to_device(bench.model)
    torch.save(bench.model.state_dict(), os.devnull)


def run(way: str) -> None:
    start("hccl" if way == "clip" else "cpu:gloo,npu:hccl")
    if way == "meta":
        build(DECODER, "pinned", on_meta=True).loss()
    bench = build(STRAIGHT if way == "buffers" else DECODER, "pinned")
    if way == "save":
        bench.train()
        save_checkpoint(bench)
    elif way == "forward":
        load_model_to_device(bench.model)
        bench.train()
    elif way == "backward":
        bench.train()
        bench.optimizer.zero_grad()
        load_model_to_device(bench.model)
        bench.train()
    elif way == "clip":
        bench.loss().backward()
        nn.utils.clip_grad_norm_(list(bench.model.parameters()), 1.0)
    elif way == "step":
        bench.loss().backward()
        load_model_to_device(bench.model)
        bench.optimizer.step()
    elif way == "buffers":
        bench.model.to("cpu")
        bench.train()
    elif way == "swap":
        load_model_to_device(bench.model)
        load_model_to_device(bench.model)
    elif way in ("retry", "retry-only"):
        load_model_to_device(bench.model)
        for attempt in range(2):
            try:
                bench.train()
            except Exception:
                if attempt:
                    raise
                if way == "retry":
                    logging.exception("step 1 failed, trying once more")
                bench.model.to("cpu")
                buffers_to(bench.model, "npu")
    elif way == "shape":
        bench.model(torch.zeros(2, 3, dtype=torch.int64, device="npu")) @ torch.zeros(3, 3, device="npu")


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    run(sys.argv[1])
