"""Times a training step of the lab's decoder on the CPU and on the simulated accelerator, in one process, by turns.

Processor time, not wall time: it hardly changes when other processes keep the machine busy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from diagkit.lab.models import DecoderConfig, TinyDecoder


def step_of(device: str, width: int, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    config = DecoderConfig(vocab=256, hidden=width, intermediate=2 * width, layers=2, heads=4, kv_heads=2)
    model = TinyDecoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(0, 256, (batch, 16)).to(device)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def main(width: str, batch: str, repeats: str) -> None:
    """Prints the best step of each device in seconds of processor time, and what starting the simulator took."""
    torch.set_num_threads(1)
    from diagkit.lab import simulate

    began = time.perf_counter()
    simulate(announce=False)
    loaded = time.perf_counter() - began
    steps = {device: step_of(device, int(width), int(batch)) for device in ("cpu", "npu")}
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(int(repeats) + 2):
        for device, step in steps.items():
            began = time.process_time()
            step()
            if turn >= 2:  # the first two allocate and warm caches
                best[device] = min(best[device], time.process_time() - began)
    sys.stdout.write(json.dumps({"start": loaded, **best}) + "\n")
