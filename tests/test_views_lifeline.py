"""The lifeline: one tensor's way over the devices, in the picture and in words."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ET

import pytest
from test_views_figures import assert_layout, assert_picture
from traces import Rank, cause, engine_trace, on, unlike_names

from diagkit.errors import UsageError
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import CALL, ENTER, EXIT, GRADIENT, PARAMETER, Change, Residency, Row
from diagkit.views import lifeline
from diagkit.views.palette import ACCELERATOR, BAD_SOFT
from diagkit.views.timeline import Timeline


def training_step() -> RankTrace:
    """One step of one parameter in full detail: gathered for forward and backward, then its gradient on the CPU."""
    rank = Rank(["w"], buffers=())
    write, fact = rank.writer.moment, rank.writer.fact_id
    rank.writer.table([Row(3, GRADIENT, "model", "w", shape=(8, 8), of=0)])
    rank.writer.table([Row(4, PARAMETER, "model", "v", shape=(8, 8))], [(4, 8)])
    dtypes = {"dtype": "float32", "storage_dtype": "float32", "mesh_device": "npu"}
    sharded, whole = (
        on("cpu", True, sharded_state="sharded", **dtypes),
        on("cpu", True, sharded_state="unsharded", **dtypes),
    )
    write(ENTER, "train: enter", 1, [Change(4, 1, fact(sharded))], key=True, begins={"name": "train"})
    for _ in range(2):
        write(CALL, "unshard", 1, [Change(4, 1, fact(whole))], cause=cause("Module.forward", "unshard", line=7))
        write(CALL, "reshard", 1, [Change(4, 1, fact(sharded))], cause=cause("Module.forward", "reshard", line=7))
    rank.writer.table([Row(5, GRADIENT, "model", "v", shape=(8, 8), of=4)])
    gradient = Residency("cpu", "cpu", "float32", "float32", wrapper="DTensor")
    write(CALL, "reduce gradients", 1, [Change(5, 1, fact(gradient))], cause=cause("Tensor.backward", line=8))
    write(CALL, "Optimizer.step", 1, [])
    write(EXIT, "train: exit", 1, [])
    return rank.read()


def test_a_split_is_metadata_and_bytes_in_different_lanes() -> None:
    figure = lifeline(engine_trace(), "lm_head.weight")
    assert figure.title == "In save, Module.to splits lm_head.weight: metadata says npu:0, the bytes are on cpu"
    words = figure.to_text()
    heads = next(line for line in words.splitlines() if "save: Module.to" in line)
    (metadata,) = re.findall(r"^metadata .*$", words, flags=re.MULTILINE)
    (bytes_at,) = re.findall(r"^bytes .*$", words, flags=re.MULTILINE)
    at = heads.index("save: Module.to")
    assert metadata[at:].startswith("npu:0") and bytes_at[at:].startswith("cpu, pinned")
    assert figure.to_svg().count(f'fill="{BAD_SOFT}"') == 1, "one stretch of moments is a lasting split"


def test_a_passing_split_raises_no_alarm() -> None:
    figure = lifeline(engine_trace(guarded=True), "lm_head.weight")
    assert "in passing" in [text.text for text in figure.scene.texts()]
    assert f'fill="{BAD_SOFT}"' not in figure.to_svg()


def test_the_cause_of_a_move_stands_under_its_moment() -> None:
    words = lifeline(engine_trace(), "lm_head.weight").to_text()
    (mark,) = re.findall(r"save: Module.to (\[\d\])", words)
    assert f"{mark} cause: engine.py:41 save_checkpoint" in words


def test_a_step_in_full_detail_shows_when_the_parameter_is_whole_and_when_its_gradient_comes() -> None:
    figure = lifeline(training_step(), "v")
    assert figure.title == "v stays on cpu, pinned, through train; gathered on npu twice"
    lines = {line.split("  ")[0]: line for line in figure.to_text().splitlines()}
    assert lines["gathered"].count("npu, 256 B") == 2
    assert lines["gradient"].split()[-2:] == ["128", "B"], "laid out like the shard of its parameter"
    assert lines["bytes"].count("cpu, pinned, 128 B") == lines["metadata"].count("cpu")
    bars = list(ET.fromstring(figure.to_svg()).iter("{http://www.w3.org/2000/svg}rect"))
    assert sum(bar.get("stroke") == ACCELERATOR.fill for bar in bars) == 2


def test_calls_that_left_the_tensor_alone_are_counted_and_not_shown() -> None:
    words = lifeline(training_step(), "v").to_text()
    assert "Optimizer.step" not in words and "Shown: 7 of 8 moments" in words


def test_start_and_end_are_moments_or_phases() -> None:
    trace = engine_trace()
    assert "init" not in lifeline(trace, "lm_head", start="save").to_text()
    assert "save:" not in lifeline(trace, "lm_head", start=0, end="init").to_text()
    assert lifeline(trace, "lm_head", start=-2).title == lifeline(trace, "lm_head", start=10).title


MISTAKES = [
    (("nothing.like.it",), {}, "no such parameter or buffer: found nothing.like.it"),
    (("lm_hed.weight",), {}, "no such parameter or buffer: found lm_hed.weight, expected one of lm_head.weight"),
    (("q_proj",), {}, "several tensors have this in their names: found q_proj, expected one of model.layers.0"),
    (("lm_head",), {"start": 99}, "no such moment in this trace: found 99, expected 0 to 11"),
    (("lm_head",), {"end": "lunch"}, "no such phase in this trace: found lunch, expected one of init, train, save"),
    (("lm_head",), {"start": "save", "end": "init"}, "the end lies before the start"),
]


@pytest.mark.parametrize(("names", "options", "message"), MISTAKES, ids=[message for *_, message in MISTAKES])
def test_a_mistake_is_answered_in_one_line(names: tuple[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        lifeline(engine_trace(), *names, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [400, 1000, 1600])
@pytest.mark.parametrize("moments", [1, 3, 12])
def test_nothing_is_cut_off_or_written_over(width: int, moments: int) -> None:
    assert_layout(lifeline(engine_trace(), "lm_head", moments=moments, width=width))
    assert_layout(lifeline(training_step(), "v", moments=moments, width=width))


def test_nor_with_a_name_of_120_characters() -> None:
    (name,) = unlike_names(1, 120)
    assert_layout(lifeline(engine_trace([name]), name))


def test_a_timeline_is_what_replaying_every_moment_gives() -> None:
    rank = engine_trace(unlike_names(40, 12))[0]
    timeline = Timeline(rank)
    for moment in rank.moments:
        state = rank.state(moment).facts
        assert [timeline.of(row.id)[moment.index] for row in rank.rows] == state
    assert len(timeline.stretches) == 4, "parameters, buffer, group and engine each lived as one"


def test_the_picture_is_the_one_that_was_looked_at(tmp_path: pathlib.Path) -> None:
    assert_picture(lifeline(training_step(), "v"), "lifeline", tmp_path)
