"""The figures: what they say, that nothing is cut off or written over, that picture, page and words agree."""

from __future__ import annotations

import itertools
import pathlib
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from traces import SPLIT_MESSAGE, Rank, cause, decoder_names, engine_trace, on, unlike_names

from diagkit.errors import UsageError
from diagkit.trace.merged import Trace
from diagkit.trace.reader import RankTrace
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, MARK, Failure
from diagkit.views import ViewFigure, before_after, outcome_matrix, residency_map
from diagkit.views.palette import BAD, INK
from diagkit.views.story import tell
from diagkit.views.verdict import judge

BASELINE = pathlib.Path(__file__).parent / "baseline"
CRASH = {
    "engine": "fsdp",
    "operation": "save",
    "outcome": "crash",
    "exception": {"type": "RuntimeError", "message": SPLIT_MESSAGE},
}
MATRIX = [
    {**CRASH, "revision": "before"},
    {**CRASH, "revision": "before", "operation": "export"},
    {**CRASH, "revision": "#6463"},
    {"engine": "fsdp", "revision": "#6463", "operation": "export", "outcome": "ok", "exported": "npu"},
    {"engine": "fsdp", "revision": "#6604", "operation": "save", "outcome": "ok"},
    {"engine": "fsdp", "revision": "#6604", "operation": "export", "outcome": "ok", "exported": "npu"},
]  # fmt: skip


def both(names: list[str] | None = None, ranks: int = 1) -> ViewFigure:
    return before_after(engine_trace(names, ranks=ranks), engine_trace(names, guarded=True, ranks=ranks))


# ---- what they say

VERDICTS = [
    (
        "a split that makes state_dict fail",
        {},
        "In save, Module.to splits all 21 parameters: metadata says npu:0, the bytes are on cpu",
        f"Then state_dict raises RuntimeError: {SPLIT_MESSAGE}",
        False,
    ),
    (
        "a split at the phase's end that nothing has met yet",
        {"fails": False},
        "In save, Module.to splits all 21 parameters: metadata says npu:0, the bytes are on cpu",
        "No operation has failed on them in this trace.",
        False,
    ),
    (
        "splits that heal inside their phases",
        {"fails": False, "heals": True},
        "All 21 parameters stay on cpu, pinned, through init, train and save",
        "A split inside init and save lasted for a moment and healed before it ended: no fault.",
        True,
    ),
    (
        "a split that failed before it was healed",
        {"heals": True},
        "In save, Module.to splits all 21 parameters: metadata says npu:0, the bytes are on cpu",
        f"Then state_dict raises RuntimeError: {SPLIT_MESSAGE}",
        False,
    ),
    (
        "nothing moves in save",
        {"guarded": True},
        "All 21 parameters stay on cpu, pinned, through init, train and save",
        "A split inside init lasted for a moment and healed before it ended: no fault.",
        True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "title", "sentence", "good"), [v[1:] for v in VERDICTS], ids=[v[0] for v in VERDICTS]
)
def test_the_title_states_the_answer(options: dict[str, bool], title: str, sentence: str, good: bool) -> None:
    trace = engine_trace(**options)
    verdict = judge(tell(trace[0]))
    assert (verdict.title, verdict.sentence, verdict.good) == (title, sentence, good)
    assert residency_map(trace).title == title


def moved_and_healed(fails: bool = False) -> RankTrace:
    """Three phases: a move that splits, state_dict, and a move back."""
    rank = Rank(decoder_names(1))
    write, healthy, split = rank.writer.moment, on("cpu", True), on("npu:0", True, "cpu")
    write(ENTER, "move: enter", 1, [*rank.parameters(healthy), *rank.others()], key=True, begins={"name": "move"})
    write(CALL, "Module._apply", 1, rank.parameters(split), cause=cause("Module.to"))
    write(EXIT, "move: exit", 1, [])
    write(ENTER, "state_dict: enter", 2, [], begins={"name": "state_dict"})
    if fails:
        failure = Failure("RuntimeError", SPLIT_MESSAGE, "Module.state_dict")
        write(FAILURE, "Module.state_dict", 2, [], failure=failure)
    write(EXIT, "state_dict: exit", 2, [])
    write(ENTER, "heal: enter", 3, [], begins={"name": "heal"})
    write(CALL, "Module._apply", 3, rank.parameters(healthy), cause=cause("Module.cpu"))
    write(EXIT, "heal: exit", 3, [])
    return rank.read()


def test_a_split_that_nothing_met_is_told_without_alarm_and_so_is_what_mended_it() -> None:
    figure = residency_map(moved_and_healed())
    sentence = "No operation has failed on them in this trace; Module.cpu in heal mended them."
    assert next(text.colour for text in figure.scene.texts() if text.text == sentence) == INK
    failed = residency_map(moved_and_healed(fails=True))
    assert next(text.colour for text in failed.scene.texts() if text.text.startswith("Then state_dict")) == BAD


def test_a_phase_that_is_one_call_is_named_once() -> None:
    words = residency_map(moved_and_healed(fails=True)).to_text()
    assert "  state_dict raises [" in words and "state_dict: state_dict" not in words


def test_of_ranks_that_fail_alike_the_lowest_is_shown_whoever_was_first() -> None:
    trace = engine_trace(ranks=3)
    assert trace.first_failure is not None
    late = Trace({rank: trace.ranks[rank] for rank in (2, 1, 0)})
    assert "rank 0 (of 0..2)" in residency_map(late).to_text()
    only = Trace({0: engine_trace(guarded=True, ranks=3)[0], 1: trace[1], 2: trace[2]})
    assert "rank 1 (of 0..2)" in residency_map(only).to_text()


def test_a_narrow_panel_tells_the_whole_failure() -> None:
    figure = before_after(engine_trace(), engine_trace(guarded=True), phase="save", width=600)
    assert not [text.text for text in figure.scene.texts() if "…" in text.text and text.size == 12]


def test_tensors_stand_in_the_order_of_the_kinds_that_were_asked_for() -> None:
    words = residency_map(engine_trace(), kinds=("buffer", "parameter")).to_text()
    assert words.index("inv_freq") < words.index("embed_tokens")


def test_a_map_says_that_the_accelerator_is_simulated() -> None:
    assert "simulated npu" in residency_map(engine_trace()).to_text()
    assert "simulated npu" in both().to_text()


def test_the_cause_is_told_under_the_moment_it_struck() -> None:
    words = residency_map(engine_trace()).to_text()
    (mark,) = re.findall(r"save: Module.to (\[\d\])", words)
    assert f"{mark} cause: engine.py:41 save_checkpoint · FSDPEngine.save_checkpoint → load_model_to_device" in words


def test_a_passing_split_has_no_crimson_outline_and_a_lasting_one_has() -> None:
    def crimson(figure: ViewFigure) -> int:
        return figure.to_svg().count('stroke="#be1250"')

    assert crimson(residency_map(engine_trace(guarded=True))) == 0
    # six lines of parameters, the move and the failure, and one in the legend
    assert crimson(residency_map(engine_trace())) == 6 * 2 + 1


def test_before_and_after_share_their_rows_and_their_circumstances() -> None:
    words = both().to_text()
    assert words.startswith(
        "Unguarded, save splits all 21 parameters; guarded, all 21 parameters stay on cpu, pinned\n"
    )
    tables = words.split("\n\n")
    rows = [
        [line.split("  ")[0] for line in part.splitlines() if line.startswith(("model.", "lm_head"))]
        for part in tables[1:3]
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 7
    assert words.count("CPUOffloadPolicy(pin_memory=True)") == 1


def test_one_pattern_can_be_expanded() -> None:
    few, some = residency_map(engine_trace()).to_text(), residency_map(engine_trace(), expand="q_proj").to_text()
    assert "model.layers.0.self_attn.q_proj.weight" not in few
    assert "model.layers.0.self_attn.q_proj.weight" in some and "{k,v,o}_proj" in some
    assert len(residency_map(engine_trace(), expand=True, rows=100).to_text().splitlines()) > 22


def test_moments_can_be_chosen_and_those_left_out_are_counted() -> None:
    trace = engine_trace()
    assert "Shown: 3 of 12 moments" in residency_map(trace, moments=3).to_text()
    assert "save: Module.to" in residency_map(trace, moments=3).to_text()
    chosen = residency_map(trace, moments=[4, 9]).to_text()
    assert "after init" in chosen and "Shown: 2 of 12 moments" in chosen


def test_rows_that_do_not_fit_are_counted_and_no_split_is_dropped() -> None:
    names = unlike_names(500, 30)
    words = residency_map(engine_trace(names), rows=10).to_text()
    assert "492 more parameters" in words
    assert words.count("split") >= 2 * 10


def test_ranks_are_compared_and_the_one_that_differs_is_named() -> None:
    trace = engine_trace(ranks=8)
    assert "the other 7 ranks are alike" in residency_map(trace).to_text()
    mixed = Trace({**trace.ranks, 3: engine_trace(guarded=True, ranks=8)[3]})
    assert "rank 3 differs" in residency_map(mixed, rank=0).to_text()


def test_a_phase_by_itself() -> None:
    words = residency_map(engine_trace(), phase="save").to_text()
    assert "before save" in words and "init" not in words


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: residency_map(engine_trace(), phase="lunch"),
        "no such phase in this trace: found lunch, expected one of init",
    ),
    (lambda: residency_map(engine_trace(), moments=[99]), "no such moment in this trace: found 99, expected 0 to 11"),
    (lambda: residency_map(engine_trace(), moments=0), "a figure needs at least one moment"),
    (lambda: residency_map(engine_trace(), kinds=("widget",)), "unknown kind of tensor: found widget"),
    (lambda: residency_map(engine_trace(), kinds=("export",)), "nothing to show"),
    (lambda: residency_map(engine_trace()[0], rank=3), "this is the trace of one rank"),
    (lambda: outcome_matrix([{"engine": "fsdp"}]), "incomplete: found keys engine, expected revision"),
    (lambda: outcome_matrix([]), "needs at least one cell"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_answered_in_one_line(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        mistake()


# ---- the matrix


def test_the_matrix_tells_equal_failures_once_and_says_what_is_left() -> None:
    figure = outcome_matrix(MATRIX)
    assert figure.title == "Before the fix, 2 of 2 operations fail; at #6604, none of 2 operations fail"
    assert figure.to_text().splitlines()[2:] == [
        "engine  revision  save       export",
        "fsdp    before    CRASH [1]  CRASH [1]",
        "fsdp    #6463     CRASH [1]  ok on npu",
        "fsdp    #6604     ok         ok on npu",
        "",
        f"[1] RuntimeError: {SPLIT_MESSAGE}",
    ]


def test_the_matrix_names_what_still_fails_where_it_fails_everywhere() -> None:
    move = {**CRASH, "operation": "move"}
    ok = {"engine": "fsdp", "operation": "save", "outcome": "ok", "revision": "current"}
    cells = [{**CRASH, "revision": "before"}, {**move, "revision": "before"}, ok, {**move, "revision": "current"}]
    title = "Before the fix, 2 of 2 operations fail; in the current code, only move + state_dict still fails"
    assert outcome_matrix(cells).title == title
    elsewhere = {**move, "engine": "veomni", "revision": "current", "outcome": "ok"}
    assert outcome_matrix([*cells, elsewhere]).title.endswith("in the current code, 1 of 3 operations fails")


def test_a_cell_that_came_out_otherwise_than_expected_says_so() -> None:
    cells = [{"engine": "x", "revision": "y", "operation": "save", "outcome": "ok", "differences": ["expected crash"]}]
    assert "ok (unexpected)" in outcome_matrix(cells).to_text()


# ---- nothing cut off, nothing written over

SIZES = [
    (count, ranks, length) for count, ranks, length in itertools.product((3, 10_000), (1, 8), (4, 120))
]  # fmt: skip
VIEWS: dict[str, Callable[[list[str], int], ViewFigure]] = {
    "map": lambda names, ranks: residency_map(engine_trace(names, ranks=ranks)),
    "before and after": both,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("count", "ranks", "length"), SIZES, ids=[f"{c} names of {n}, {r} ranks" for c, r, n in SIZES])
def test_nothing_is_cut_off_or_written_over(view: str, count: int, ranks: int, length: int) -> None:
    figure = VIEWS[view](unlike_names(count, length), ranks)
    assert_layout(figure)


SHAPES: dict[str, Callable[[], ViewFigure]] = {
    "a small matrix": lambda: outcome_matrix(MATRIX),
    "long words": lambda: outcome_matrix([{**MATRIX[0], "engine": "e" * 120, "revision": "r" * 120}]),
    "a long operation": lambda: outcome_matrix([{**MATRIX[0], "operation": "o" * 120}]),
    "many operations": lambda: outcome_matrix(many_operations()),
    "all moments": lambda: residency_map(engine_trace(), moments=13),
    "one moment": lambda: residency_map(engine_trace(), moments=1),
    "60 rows": lambda: residency_map(engine_trace(decoder_names(28)), expand=True, rows=60),
    "28 layers": lambda: both(decoder_names(28)),
}


@pytest.mark.parametrize("name", ["save", "save {}"])
def test_of_a_cycle_of_many_steps_the_first_is_shown_and_the_end(name: str) -> None:
    """A row of nothing but splits would hide that the model was healthy before, between and after them."""
    rank = Rank(["a.0.w"], buffers=())
    write = rank.writer.moment
    write(MARK, "start", 0, rank.parameters(on("cpu", True)), key=True)
    for n in range(1, 30):
        at = name.format(n)
        write(ENTER, f"{at}: enter", n, [], begins={"name": at})
        write(CALL, "Module.to", n, rank.parameters(on("npu:0", True, "cpu")), cause=cause("Module.to"))
        write(CALL, "Module.to", n, rank.parameters(on("cpu", True)), cause=cause("Module.to", line=42))
        write(EXIT, f"{at}: exit", n, [])
    told = tell(rank.read(), moments=6)
    splits = [column.splits for column in told.columns]
    assert [column.moment.index for column in told.columns][:4] == [0, 2, 3, 4]
    assert sum(splits) == 1 and told.columns[-1].moment.index == told.every[-1].moment.index


@pytest.mark.parametrize("shape", SHAPES)
def test_nor_in_unusual_shapes(shape: str) -> None:
    assert_layout(SHAPES[shape]())


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_nor_with_names_in_another_script() -> None:
    assert_layout(residency_map(engine_trace(["布局." * 20 + "权重", "$a_{b}$", "w"])))


def test_a_map_of_ten_thousand_parameters_takes_less_than_three_seconds() -> None:
    names = [f"model.layers.{i}.experts.{e}.up_proj.weight" for i in range(100) for e in range(100)]
    trace = engine_trace(names, ranks=8)
    started = time.process_time()  # not the clock on the wall: other tests run beside this one
    figure = residency_map(trace)
    assert time.process_time() - started < 3.0
    assert "model.layers.{0..99}.experts.{0..99}.up_proj.weight" in figure.to_text()


def many_operations() -> list[dict[str, object]]:
    return [
        {**MATRIX[0], "group": group, "operation": f"operation {i}"} for group in ("a:b,c:d", "d") for i in range(9)
    ]


def assert_layout(figure: ViewFigure) -> None:
    """Every text stands inside the figure and no two share a place; by the boxes that matplotlib draws."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    width, height = figure.bbox.width, figure.bbox.height
    texts = [artist for artist in figure.axes[0].texts if isinstance(artist, Text) and artist.get_text()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, f"{text!r} is cut off"
    slack = 1.0  # hinting
    boxes.sort(key=lambda entry: entry[1].x0)
    for i, (text, box) in enumerate(boxes):
        for other, their in boxes[i + 1 :]:
            if their.x0 > box.x1 - slack:
                break
            apart = their.y0 > box.y1 - slack or their.y1 < box.y0 + slack
            assert apart, f"{text!r} and {other!r} overlap"


# ---- the page


def test_the_page_needs_no_script_and_loads_nothing() -> None:
    for figure in (residency_map(engine_trace()), both(), outcome_matrix(MATRIX)):
        html = figure.to_html(whole_page=True)
        assert "<script" not in html and "javascript:" not in html
        assert not re.findall(r"(?:src|href)\s*=|url\(|@import", html)
        assert "default-src 'none'" in html


def test_the_picture_on_the_page_is_well_formed_and_named() -> None:
    figure = both()
    root = ET.fromstring(figure.to_svg())
    assert root.get("role") == "img" and root.get("aria-label") == figure.title
    assert len(list(root.iter("{http://www.w3.org/2000/svg}text"))) > 40


HOSTILE = [
    "<script>alert(1)</script>",
    'a"onmouseover="alert(1)',
    "</pre></details><b>",
    "a\x1b[31mred\x1b[0m",
    "a\u202egnp.exe",
    "a\nb\rc\td",
    "\u200b",
    "$x^2$ \\frac",
]


def test_hostile_names_are_shown_as_text_in_every_form() -> None:
    figure = residency_map(engine_trace(HOSTILE), rows=50)
    assert_layout(figure)
    ET.fromstring(figure.to_svg())
    for form in (figure.to_html(), figure.to_text()):
        assert "\x1b" not in form and "\u202e" not in form and "\u200b" not in form
    html = figure.to_html()
    assert "<script" not in html and "<b>" not in html and not re.search(r"<[^>]*onmouseover", html)


# ---- the picture

PICTURES: dict[str, Callable[[], ViewFigure]] = {
    "map": lambda: residency_map(engine_trace(["lm_head.weight"])),
    "before_after": lambda: both(["lm_head.weight"]),
    "matrix": lambda: outcome_matrix(MATRIX),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_the_one_that_was_looked_at(name: str, tmp_path: pathlib.Path) -> None:
    assert_picture(PICTURES[name](), name, tmp_path)


def assert_picture(figure: ViewFigure, name: str, folder: pathlib.Path) -> None:
    """Renew a picture by deleting it from tests/baseline and running its test; then look at it."""
    drawn, kept = folder / f"{name}.png", BASELINE / f"{name}.png"
    figure.savefig(drawn, dpi=50)
    if not kept.exists():
        kept.write_bytes(drawn.read_bytes())
        pytest.fail(f"{kept} was missing and has been drawn: look at it, then run again")
    new, old = imread(drawn)[..., :3], imread(kept)[..., :3]
    assert new.shape == old.shape
    difference = abs(new - old)
    # A glyph's edge may shade otherwise with another FreeType; a shape that moved or changed its colour does not pass.
    assert difference.mean() < 0.004, f"mean difference {difference.mean():.4f}"
    assert (difference.max(axis=2) > 0.25).mean() < 0.01
