"""What one tool costs a training step; one process (or one a rank) for each tool and set-up.

A step is forward, backward, optimizer step and ``state_dict()`` of a stack of FSDP2 blocks, batch 32, on the simulated
accelerator. ``bench.py`` runs it for all tools; by hand:

    python tests/benchmarks/step_cost.py --tool "diagkit transitions" [--width 64] [--blocks 24] [--no-offload]

Prints one JSON object: the tool's figures, those of the null run beside it, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from timing import paired
from tools import TOOLS
from worlds import one_rank, trained

WARM_UP = 5


def measure(tool: str, width: int, blocks: int, offload: bool, pairs: int) -> dict[str, object]:
    """The figures of one tool in this process, whose process group is up."""
    model, optimizer, train = trained(blocks * 4, width, offload)

    def step() -> None:
        train()
        model.state_dict()

    with tempfile.TemporaryDirectory() as out:
        null = TOOLS["nothing"](model, optimizer, out)
        before = paired(step, null.around, null.on, null.off, pairs // 2, WARM_UP)
        used = TOOLS[tool](model, optimizer, out)
        result = paired(step, used.around, used.on, used.off, pairs, WARM_UP)
        events = used.events()
        after = paired(step, null.around, null.on, null.off, pairs // 2, 2)
    excess = (before["ratio"] + after["ratio"]) / 2
    return {
        "tool": tool,
        "width": width,
        "blocks": blocks,
        "offload": offload,
        **result,
        "null": excess,
        "over_null": result["ratio"] - (excess - 1),
        "events": events,
        "us_per_event": result["added_us"] / events if events else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=list(TOOLS), default="diagkit transitions")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=24, help="of four parameters each")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--no-offload", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        meeting = args.rendezvous or os.path.join(folder, "store")
        others = []
        if args.rendezvous is None:
            again = [sys.executable, __file__, *sys.argv[1:], "--rendezvous", meeting]
            others = [
                subprocess.Popen([*again, "--rank", str(rank)], stdout=subprocess.DEVNULL)
                for rank in range(1, args.ranks)
            ]
        try:
            with one_rank(args.rank, args.ranks, meeting):
                result = measure(args.tool, args.width, args.blocks, not args.no_offload, args.pairs)
        finally:
            for other in others:
                other.wait()
    print(json.dumps({"ranks": args.ranks, **result}))


if __name__ == "__main__":
    main()
