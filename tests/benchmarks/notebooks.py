"""What each notebook takes: with its own parameters, as by hand, and with the smaller ones of the tests.

Wall seconds, and seconds of processor time of the kernel and of every process that it starts. Prints one JSON line.
Run: ``python tests/benchmarks/notebooks.py [--only 05 ...]``
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_notebooks import NOTEBOOKS, SMALLER, read, run, with_parameters


def taken(path: Path, values: dict[str, Any]) -> dict[str, float]:
    """Runs a notebook with these values of its parameters."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = with_parameters(read(path), {**values, "trace": f"{folder}/traces"})
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run(notebook, path.parent)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return {"wall": wall, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="notebooks, by their numbers")
    parser.add_argument("--quick", action="store_true", help="with the tests' parameters only")
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for path in NOTEBOOKS:
        number = path.name[:2]
        if not args.only or number in args.only:
            sizes = {**({} if args.quick else {"by hand": {}}), "tests": SMALLER.get(number, {})}
            found[path.stem] = {size: taken(path, values) for size, values in sizes.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
