"""``python -m diagkit.demo.predictions``: measures every state and operation on the installed torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagkit.demo.predictions import cells, forked
from diagkit.demo.predictions.bench import DECODER, STRAIGHT
from diagkit.demo.predictions.states import STATES, State
from diagkit.diagnosis import predictions
from diagkit.diagnosis.predictions.facets import Facets
from diagkit.diagnosis.predictions.lookup import Cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m diagkit.demo.predictions", description=__doc__)
    parser.add_argument("--out", type=Path, help="the table's file (default: beside the reader of the tables)")
    parser.add_argument("--only", default="", help="states whose name holds this text; writes nothing")
    parser.add_argument("--probe", metavar="NAME", help="one state by name: its table goes to standard output")
    parser.add_argument("--alone", action="store_true", help="each operation in processes of its own (slow)")
    args = parser.parse_args()
    device = forked.warm_up()
    import torch

    version = str(torch.__version__).partition("+")[0]
    entries: dict[Facets, tuple[str, dict[str, Cell]]] = {}
    started = time.monotonic()
    for state in STATES:
        if args.only not in state.name or args.probe not in (None, state.name):
            continue
        for ranks in state.ranks:
            key, found = measure(state, ranks, device, args.alone)
            print(f"{time.monotonic() - started:6.1f} s  {state.name}, {ranks} rank(s): {key}", file=sys.stderr)
            known = entries.get(key)
            if known is not None and known[1] != found:
                print(f"  not told apart from {known[0]!r}: {_differences(known[1], found)}", file=sys.stderr)
            entries.setdefault(key, (state.name, found))
            if args.only:
                print(json.dumps({op: [c.outcome, c.error] for op, c in found.items()}, indent=1))
    if args.only:
        return 0
    table: dict[str, Any] = {
        "torch": version,
        "simulated": True,
        "states": [
            {
                "name": name,
                "state": asdict(key),
                "operations": {op: [c.outcome, c.error] if c.error else [c.outcome] for op, c in found.items()},
            }
            for key, (name, found) in entries.items()
        ],
    }
    if args.probe is not None:
        print(json.dumps(table))
        return 0 if entries else 2
    out = args.out or Path(predictions.__file__).parent / f"torch-{version}.json"
    lines = ",\n".join(json.dumps(entry) for entry in table.pop("states"))
    out.write_text(json.dumps(table)[:-1] + ', "states": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(f"{len(entries)} states in {out}", file=sys.stderr)
    return 0


def measure(state: State, ranks: int, device: str, alone: bool = False) -> tuple[Facets, dict[str, Cell]]:
    """The cells of a state; one that depends on how a model treats its buffers says so."""
    key, found = cells.run_state(DECODER, state, ranks, device, alone)
    if key.buffers == "home":
        return key, found
    _, straight = cells.run_state(STRAIGHT, state, ranks, device, alone)
    merged = {
        op: c if c == straight[op] else Cell("depends", (straight[op].error or c.error)) for op, c in found.items()
    }
    return key, merged


def _differences(one: dict[str, Cell], other: dict[str, Cell]) -> str:
    return "; ".join(f"{op}: {one[op]} or {other[op]}" for op in one if one[op] != other[op])


if __name__ == "__main__":
    sys.exit(main())
