"""The rank grid: who differs from whom, at eight ranks and at a thousand."""

from __future__ import annotations

import pathlib
import re

import pytest
from test_views_figures import assert_layout, assert_picture
from traces import engine_trace, unlike_names

from diagkit.errors import UsageError
from diagkit.trace.merged import Trace
from diagkit.views import rank_grid
from diagkit.views.palette import BAD, INK

Ranks = range | tuple[int, ...]


def mixed(ranks: int, guarded: Ranks = (), missing: Ranks = (), cut: Ranks = ()) -> Trace:
    """A run in which some ranks did not move, some left nothing and some were cut off in save."""
    moved, still = engine_trace(ranks=ranks), engine_trace(guarded=True, ranks=ranks)
    found = {r: (still if r in guarded else moved)[r] for r in range(ranks) if r not in missing}
    for rank in cut:
        found[rank].ended = None
        found[rank].phases[3].exit = None
    return Trace(found)


def test_of_eight_ranks_the_one_that_differs_is_named_and_how() -> None:
    figure = rank_grid(mixed(8, guarded=(3,)))
    assert figure.title == "Rank 3 differs from the other 7 in 21 tensors"
    words = figure.to_text()
    assert "model.embed_tokens.weight: cpu pinned where most have npu/cpu pinned, split." in words
    heads = next(line for line in words.splitlines() if "rank 3" in line)
    below = next(line for line in words.splitlines() if line.strip() == "differs")
    assert below.index("differs") == heads.index("rank 3")
    assert figure.to_svg().count(f'stroke="{INK}"') == 6, "six lines of parameters are outlined, the buffer is not"


def test_ranks_that_differ_in_the_index_of_their_device_alone_are_alike() -> None:
    figure = rank_grid(engine_trace(ranks=8))
    assert figure.title == "All 8 ranks are alike"
    assert "differs" not in figure.to_text()


def test_a_missing_rank_and_one_that_was_cut_off_are_seen_to_be() -> None:
    figure = rank_grid(mixed(8, missing=(5,), cut=(6,)))
    assert figure.title == "The 7 ranks that left a trace are alike; 1 is missing; 1 was cut off"
    assert "missing: 5" in figure.to_text() and "rank 6: cut off in save" in figure.to_text()
    red = {text.text for text in figure.scene.texts() if text.colour == BAD}
    assert {"5", "6", "missing", "cut off in", "save"} <= red


def test_a_thousand_ranks_are_folded_and_every_one_is_found() -> None:
    few = (7, 207, 1023)
    figure = rank_grid(mixed(1024, guarded=few, missing=(77,), cut=(900,)))
    assert figure.title == "3 ranks differ from the other 1,020 in 21 tensors; 1 is missing; 1 was cut off"
    assert "B: ranks 7, 207, 1023\n" in figure.to_text()
    tips = re.findall(r"<title>(rank \d+: [^<]*)</title>", figure.to_svg())
    assert [tip.removeprefix("rank ") for tip in tips] == [
        *("7: group B", "77: missing", "207: group B", "900: group A, cut off in save", "1023: group B")
    ]
    assert len(figure.to_svg()) < 40_000


def test_ranks_meet_at_the_same_place_of_the_same_phase_whatever_they_did_before() -> None:
    trace = mixed(4, guarded=(2,))
    assert rank_grid(trace, "train").title == "All 4 ranks are alike"
    assert rank_grid(trace, "save").title.startswith("Rank 2 differs")
    # Moment 9 of rank 0 is save's move, which rank 2 never made: it is shown where it was before.
    assert rank_grid(trace, 9).title.startswith("Rank 2 differs from the other 3")
    assert "at “train: exit”" in rank_grid(trace, 7).to_text()
    assert rank_grid(trace, trace[0].moments[7]).title == rank_grid(trace, 7).title


def test_a_rank_that_knows_other_tensors_is_compared_all_the_same() -> None:
    trace = Trace({0: engine_trace(["a", "b"], ranks=2)[0], 1: engine_trace(["b"], ranks=2)[1]})
    figure = rank_grid(trace)
    assert figure.title == "Rank 1 differs from rank 0 in 1 tensor"
    assert re.search(r"^a +npu/cpu pinned, split +-$", figure.to_text(), flags=re.MULTILINE)


def test_states_beyond_sixteen_are_counted() -> None:
    ranks = {r: engine_trace([f"w{i}" for i in range(r + 1)], ranks=20)[r] for r in range(20)}
    assert "4 ranks are in 4 further states." in rank_grid(Trace(ranks)).to_text()


@pytest.mark.parametrize(
    ("moment", "message"),
    [("lunch", "no such phase in this trace: found lunch"), (99, "no such moment in this trace: found 99")],
)
def test_a_mistake_is_answered_in_one_line(moment: int | str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_grid(engine_trace(), moment)


@pytest.mark.parametrize(
    ("ranks", "width"), [(1, 400), (2, 1000), (16, 400), (16, 1000), (17, 400), (200, 1000), (300, 400)]
)
def test_nothing_is_cut_off_or_written_over(ranks: int, width: int) -> None:
    assert_layout(rank_grid(mixed(ranks, guarded=range(ranks // 2), cut=(0,)), width=width))


def test_nor_with_names_of_120_characters_on_many_ranks() -> None:
    assert_layout(rank_grid(engine_trace(unlike_names(60, 120), ranks=8), rows=60))


def test_the_picture_is_the_one_that_was_looked_at(tmp_path: pathlib.Path) -> None:
    assert_picture(rank_grid(mixed(20, guarded=(3, 4), missing=(7,), cut=(9,))), "grid", tmp_path)
