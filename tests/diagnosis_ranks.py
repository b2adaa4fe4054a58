"""Every hazard of the catalogue, really brought about on forked ranks of the simulated accelerator, and mended.

``python diagnosis_ranks.py OUT`` runs all scenarios and writes ``OUT/results.json``; traces are in ``OUT/NAME``.
A scenario has a phase per step; "remedy" does what the rule's text says, and "after" proves that it cured. They are in
`scenarios_*.py`, by family.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from diagnosis_lab import run

from diagkit.demo.predictions.forked import warm_up


def main() -> None:
    folder = Path(sys.argv[1])
    warm_up()
    for family in sorted(Path(__file__).parent.glob("scenarios_*.py")):
        importlib.import_module(family.stem)
    started = time.monotonic()
    results = run(folder, *sys.argv[2:])
    (folder / "results.json").write_text(json.dumps(results))
    print(f"{len(results)} scenarios in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
