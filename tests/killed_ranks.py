"""Twenty ranks that record, each killed at a moment of its own. Prints what each was doing, as it noted itself."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import random
import signal
import struct
import sys
import time

import torch
from torch import nn

from diagkit.capture import start

RANKS, AT_ONCE = 20, 4
NAMES = ("train", "save", "load")


def work(folder: str, rank: int, note: mmap.mmap) -> None:
    """Records for ever. ``note`` holds the ordinals of the phases begun, entered, about to end and left."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), DIAGKIT_RUN="killed")
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = start(model, optimizer, out=folder)
    number = 0
    while True:
        number += 1
        name = NAMES[number % 3]
        note[0:4] = struct.pack("i", number)
        with recorder.phase(name):
            note[4:8] = struct.pack("i", number)
            if name == "train":
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            elif name == "save":
                model.state_dict()
                model.double()
            else:
                model.load_state_dict(model.state_dict())
                model.float()
                optimizer.zero_grad()
            note[8:12] = struct.pack("i", number)
        note[12:16] = struct.pack("i", number)


def main(folder: str, seed: str) -> None:
    chance = random.Random(int(seed))
    path = pathlib.Path(folder)
    told: list[dict[str, int]] = []
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # what a first optimizer imports is imported once, here
    for first in range(0, RANKS, AT_ONCE):
        victims = []
        for rank in range(first, first + AT_ONCE):
            note = mmap.mmap(-1, 16)
            child = os.fork()
            if child == 0:
                try:
                    work(folder, rank, note)
                finally:
                    os._exit(1)
            victims.append((rank, child, note))
        for rank, child, note in victims:
            while struct.unpack("4i", note[:16])[0] < 2 or not (path / f"rank-{rank:05d}.jsonl").exists():
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.12))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            begun, entered, ending, left = struct.unpack("4i", note[:16])
            told.append(
                {"signal": os.WTERMSIG(status), "begun": begun, "entered": entered, "ending": ending, "left": left}
            )
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
