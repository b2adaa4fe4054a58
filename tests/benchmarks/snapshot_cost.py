"""What one look at every parameter costs, beside a bare loop over the same facts and beside ``state_dict()``.

One process, 4,000 pinned parameters under CPUOffloadPolicy on the simulated accelerator; the three alternate in one
loop, and the medians of the paired ratios count. Run: ``python tests/benchmarks/snapshot_cost.py``
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from facts import managed_parameters, read_facts
from worlds import one_rank, stack

from diagkit.capture.inventory import PARAMETER, Inventory
from diagkit.trace.schema import Header
from diagkit.trace.writer import MemorySink, TraceWriter

PARAMETERS = 4000
ROUNDS = 40


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    with one_rank():
        model = stack(PARAMETERS)
        records = managed_parameters(model)
        assert len(records) == PARAMETERS, len(records)
        writer = TraceWriter(MemorySink(), Header())
        inventory = Inventory(lambda rows, shapes: writer.table(rows, shapes), writer.fact_id)
        inventory.add_model(model)
        kinds = frozenset((PARAMETER,))
        assert sum(c.count for c in inventory.scan(kinds)) == PARAMETERS

        def bare() -> None:
            read_facts(records)

        def scan() -> None:
            assert not inventory.scan(kinds)

        calls = {"bare loop": bare, "snapshot": scan, "state_dict()": model.state_dict}
        for call in calls.values():
            call()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for n in range(ROUNDS):
            for name in list(calls) if n % 2 else list(calls)[::-1]:
                seconds[name].append(timed(calls[name]))
        per = {name: statistics.median(times) / PARAMETERS * 1e6 for name, times in seconds.items()}
        ratio = {
            name: statistics.median(a / b for a, b in zip(seconds["snapshot"], seconds[name], strict=True))
            for name in ("bare loop", "state_dict()")
        }
        for name, us in per.items():
            print(f"{name:14} {us:6.2f} us a parameter")
        for name, value in ratio.items():
            print(f"snapshot / {name:14} {value:.3f}")
        json.dump({"us_per_parameter": per, "snapshot_over": ratio, "parameters": PARAMETERS}, sys.stdout)
        print()


if __name__ == "__main__":
    main()
