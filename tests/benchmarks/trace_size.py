"""How much a trace grows: bytes per parameter and moment, beside the table.

4,000 parameters with names as models have them, 200 moments, a random tenth of the parameters changing twice at
random moments; written with the public writer. No torch is needed. Run: ``python tests/benchmarks/trace_size.py``
"""

from __future__ import annotations

import json
import random

from diagkit.trace.schema import CALL, MARK, PARAMETER, Change, Header, Residency, Row
from diagkit.trace.writer import MemorySink, TraceWriter

PARAMETERS, MOMENTS = 4000, 200


def main() -> None:
    draw = random.Random(0)
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="size", device="npu", simulated=True))
    rows = [
        Row(i, PARAMETER, "model", f"model.layers.{i // 9}.self_attn.proj{i % 9}.weight", shape=(64, 64))
        for i in range(PARAMETERS)
    ]
    writer.table(rows, [(32, 64)] * PARAMETERS)
    head = sum(map(len, sink.lines))
    healthy, split = (
        writer.fact_id(Residency(device, "cpu", dtype="float32", storage_dtype="float32", pinned=True))
        for device in ("cpu", "npu:0")
    )
    at: dict[int, list[Change]] = {}
    for row in draw.sample(range(PARAMETERS), PARAMETERS // 10):
        first, second = sorted(draw.sample(range(1, MOMENTS), 2))
        at.setdefault(first, []).append(Change(row, 1, split, True))
        at.setdefault(second, []).append(Change(row, 1, healthy, True))
    state = dict.fromkeys(range(PARAMETERS), healthy)
    for moment in range(MOMENTS):
        changes = sorted(at.get(moment, []), key=lambda change: change.start)
        state.update({change.start: change.facts for change in changes})
        key = writer.wants_key()
        if key:
            changes = [Change(row, 1, facts) for row, facts in state.items()]
        writer.moment(CALL if moment else MARK, "Module.to", 0, changes, key=key)
    grown = sum(map(len, sink.lines)) - head
    per = grown / PARAMETERS / MOMENTS
    print(f"table {head:,} bytes, moments {grown:,} bytes: {per:.3f} bytes per parameter and moment")
    print(json.dumps({"parameters": PARAMETERS, "moments": MOMENTS, "bytes_per_parameter_and_moment": per}))


if __name__ == "__main__":
    main()
