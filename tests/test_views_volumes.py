"""Bytes by device: what is counted, what is not, and that the bars say it."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterable

import pytest
from test_views_figures import assert_layout, assert_picture
from traces import engine_trace, on

from diagkit.errors import UsageError
from diagkit.trace.reader import RankTrace, read_rank
from diagkit.trace.schema import (
    EXPORT,
    GRADIENT,
    MARK,
    OPTIMIZER_STATE,
    PARAMETER,
    Change,
    Header,
    Residency,
    Row,
)
from diagkit.trace.writer import MemorySink, TraceWriter
from diagkit.views import bytes_by_device
from diagkit.views.holdings import PAGEABLE, PINNED, holdings
from diagkit.views.sizes import human

FLOAT = {"dtype": "float32", "storage_dtype": "float32", "mesh_device": "npu"}
SHARDED = on("cpu", True, sharded_state="sharded", **FLOAT)
WHOLE = on("cpu", True, sharded_state="unsharded", **FLOAT)
KB = 1024


def story(*states: Iterable[tuple[int, Residency | None]], memory: int = 0, index: int | None = 0) -> RankTrace:
    """Rows: 0 and 1 parameters (2 kB here, 8 kB whole), 2 a gradient, 3 a state, 4 an export; a moment per state."""
    sink = MemorySink()
    header = Header(
        run="t", torch="2.13.0", device="npu", device_index=index, simulated=True, device_memory=memory, world_size=4
    )
    writer = TraceWriter(sink, header)
    writer.table([Row(i, PARAMETER, "model", f"l.{i}.w", shape=(64, 32)) for i in range(2)], [(16, 32)] * 2)
    for i, (kind, part) in enumerate([(GRADIENT, ""), (OPTIMIZER_STATE, "exp_avg"), (EXPORT, "")], 2):
        writer.table([Row(i, kind, "model", "l.0.w", part, (64, 32), 0)])
    for i, state in enumerate(states):
        changes = [Change(row, 1, writer.fact_id(facts) if facts else 0) for row, facts in sorted(state)]
        writer.moment(MARK, f"call {i}", 0, changes, key=i == 0)
    writer.close()
    return read_rank(sink.lines)


def test_pinned_and_pageable_host_memory_stand_apart_and_meta_holds_nothing() -> None:
    meta, pageable = on("meta", **FLOAT), on("cpu", **FLOAT)
    held = holdings(story([(0, meta), (1, meta)], [(0, SHARDED), (1, pageable)]))
    assert not held[0].bytes_of and held[0].unsized == 0
    assert dict(held[1].bytes_of) == {(PINNED, "parameters"): 2 * KB, (PAGEABLE, "parameters"): 2 * KB}


def test_a_gathered_parameter_counts_whole_on_the_accelerator_and_beside_its_shard() -> None:
    held = holdings(story([(0, SHARDED)], [(0, WHOLE)], [(0, SHARDED)]))
    assert [h.total("npu:0") for h in held] == [0, 8 * KB, 0]
    assert [h.total(PINNED) for h in held] == [2 * KB] * 3


def test_a_storage_with_two_names_counts_once() -> None:
    tied = on("cpu", True, shares="tie", **FLOAT)
    view = Residency("cpu", "cpu", shares="parameter", wrapper="DTensor", dtype="float32", storage_dtype="float32")
    (held,) = holdings(story([(0, SHARDED), (1, tied), (4, view)]))
    assert held.total(PINNED) == 2 * KB and held.total(PAGEABLE) == 0


def test_flat_bytes_that_are_no_longer_the_parameters_own_count_by_themselves() -> None:
    apart = Residency(
        "npu:0", "npu:0", "float32", "float32", wrapper="DTensor", flat_device="cpu", flat_pinned=True, aliased=False
    )
    (held,) = holdings(story([(0, apart)]))
    assert (held.total("npu:0"), held.total(PINNED)) == (2 * KB, 2 * KB)


def test_gradients_and_states_are_laid_out_like_their_parameter() -> None:
    own = Residency("cpu", "cpu", "float32", "float32", wrapper="DTensor")
    (held,) = holdings(story([(0, SHARDED), (2, own), (3, own)]))
    assert held.bytes_of[PAGEABLE, "gradients"] == held.bytes_of[PAGEABLE, "optimizer state"] == 2 * KB


def test_what_has_no_size_in_the_trace_is_counted_as_such() -> None:
    nameless = on("cpu", True)  # no dtype
    held = holdings(story([(0, nameless), (1, SHARDED)]))
    assert held[0].unsized == 1 and held[0].total(PINNED) == 2 * KB
    assert "1 tensor of unknown size not counted" in bytes_by_device(story([(0, nameless), (1, SHARDED)])).to_text()


def test_the_title_tells_the_peaks_and_a_peak_is_always_shown() -> None:
    quiet = [[(0, SHARDED)], [(0, WHOLE)], [(0, SHARDED)]] * 8
    quiet[13] = [(0, WHOLE), (1, WHOLE)]
    figure = bytes_by_device(story(*quiet), moments=3)
    assert figure.title == "At most 16 kB on npu:0 and 4 kB in pinned host memory"
    assert "npu:0 holds most at “call 13”: all of it gathered copies." in figure.to_text()
    assert "call 13" in figure.to_text() and "16 kB of gathered copies on npu:0" in figure.to_svg()


def test_heights_have_one_scale() -> None:
    figure = bytes_by_device(story([(0, SHARDED)], [(0, WHOLE)]))
    bars = {}
    for shape in figure.scene.shapes:
        if found := re.search(r"call 1: (.*) of .* on (.*)", getattr(shape, "tip", "")):
            bars[found[2]] = shape.height  # type: ignore[union-attr]
    assert math.isclose(bars["npu:0"], 4 * bars[PINNED])


@pytest.mark.parametrize(("memory", "lines"), [(0, 0), (1, 0)])
def test_far_from_its_limit_a_device_has_no_line(memory: int, lines: int) -> None:
    figure = bytes_by_device(story([(0, WHOLE)], memory=memory))
    assert figure.to_svg().count('stroke="#be1250"') == lines
    assert ("(of 1 MB)" in figure.to_text()) == bool(memory)


def test_near_its_limit_it_has_one() -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="t", device="npu", device_index=0, device_memory=1))
    writer.table([Row(0, PARAMETER, "model", "w", shape=(1024, 200))])
    writer.moment(MARK, "start", 0, [Change(0, 1, writer.fact_id(Residency("npu:0", "npu:0", "float32", "float32")))])
    writer.close()
    figure = bytes_by_device(read_rank(sink.lines))
    assert figure.to_svg().count('stroke="#be1250"') == 1


def test_a_trace_without_sizes_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="nothing to count: found 12 moments, no tensor of a known size"):
        bytes_by_device(engine_trace())


@pytest.mark.parametrize("width", [400, 1000])
@pytest.mark.parametrize("moments", [1, 4, 12])
def test_nothing_is_cut_off_or_written_over(width: int, moments: int) -> None:
    states = [[(0, SHARDED), (1, WHOLE)], [(0, WHOLE)], [(0, SHARDED), (2, on("cpu", **FLOAT))], [(1, SHARDED)]] * 4
    assert_layout(bytes_by_device(story(*states, memory=80 * KB), moments=moments, width=width))


def test_sizes_read_well() -> None:
    assert [human(n) for n in (0, 999, 1024, 10 * KB, 102348, 3 << 30, 1 << 62)] == [
        "0 B", "999 B", "1 kB", "10 kB", "100 kB", "3 GB", "4,096 PB",
    ]  # fmt: skip


def test_the_picture_is_the_one_that_was_looked_at(tmp_path: pathlib.Path) -> None:
    states = [[(0, SHARDED)], [(0, WHOLE), (1, SHARDED)], [(0, SHARDED), (2, on("cpu", **FLOAT))]]
    assert_picture(bytes_by_device(story(*states)), "volumes", tmp_path)
