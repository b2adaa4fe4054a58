"""The residency table and a trace at a glance: in a terminal and in a notebook, with what is wrong said first."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from test_views_figures import HOSTILE
from traces import decoder_names, engine_trace

from diagkit.trace.merged import Trace
from diagkit.trace.schema import BUFFER, OPTIMIZER_STATE, PARAMETER, Residency, Row
from diagkit.trace.table import ResidencyTable
from diagkit.views.html import table_html, trace_html

HOME = Residency("cpu", "cpu", pinned=True, wrapper="DTensor", aliased=True, registered=True)


def tensors(*facts: Residency, kind: str = PARAMETER) -> list[tuple[Row, Residency]]:
    return [(Row(i, kind, "model", f"layers.{i}.weight"), f) for i, f in enumerate(facts)]


NOTES = [
    ("healthy and pinned", HOME, "cpu       cpu pinned"),
    ("split", Residency("npu:0", "cpu", pinned=True), "npu:0     cpu pinned  SPLIT"),
    ("on another index", Residency("npu:0", "npu:1"), "npu:0     npu:1  SPLIT"),
    ("bytes that cannot be read", Residency("cpu", unreadable="Float8"), "cpu       ?      not readable: Float8"),
    ("no elements here", Residency("cpu", "cpu", empty=True, aliased=False), "no elements on this rank"),
    ("the alias is broken", Residency("npu:0", "npu:0", aliased=False), "FSDP2 gathers other bytes"),
    ("another one in the slot", Residency("cpu", "cpu", registered=False), "not the parameter that FSDP2 gathers"),
    ("unsharded", Residency("cpu", "cpu", sharded_state="unsharded"), "unsharded"),
    ("dtypes disagree", Residency("cpu", "cpu", "bfloat16", "float32"), "says bfloat16, holds float32"),
    ("a tie", Residency("cpu", "cpu", shares="tie"), "tied"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "told"), [case[1:] for case in NOTES], ids=[case[0] for case in NOTES])
def test_a_line_tells_what_is_unusual_and_nothing_else(facts: Residency, told: str) -> None:
    line = str(ResidencyTable.of(tensors(facts))).splitlines()[-1]
    assert line.endswith(told)
    if facts is HOME:
        assert line.split() == ["layers.0.weight", "cpu", "cpu", "pinned"]


def test_tensors_that_live_alike_share_a_line_and_no_others_do() -> None:
    away = Residency("npu:0", "npu:0")
    table = ResidencyTable.of(tensors(HOME, HOME, away, HOME))
    assert [(line.name, line.metadata_device) for line in table] == [
        ("layers.{0,1,3}.weight ×3", "cpu"),
        ("layers.2.weight", "npu:0"),
    ]


def test_parts_of_one_state_share_a_line() -> None:
    rows = [
        (Row(i, OPTIMIZER_STATE, "model", "w", part), Residency("cpu", "cpu"))
        for i, part in enumerate(("exp_avg", "step"))
    ]
    (line,) = ResidencyTable.of(rows)
    assert line.name == "w [exp_avg, step] ×2"


def test_two_models_keep_their_names() -> None:
    rows = [(Row(i, PARAMETER, model, "w"), HOME) for i, model in enumerate(("actor", "ref"))]
    assert [line.pattern for line in ResidencyTable.of(rows)] == ["actor: w", "ref: w"]


def test_a_table_says_that_the_accelerator_is_simulated() -> None:
    assert "simulated npu" in str(ResidencyTable.at(engine_trace()[0]))
    assert "(simulated accelerator)" in str(ResidencyTable.of(tensors(HOME), title="now", simulated=True))


def test_the_table_of_a_moment_counts_its_splits() -> None:
    rank = engine_trace()[0]
    failure = next(moment for moment in rank.moments if moment.failure)
    assert ResidencyTable.at(rank, failure).splits == 21
    assert ResidencyTable.at(rank, 4).splits == 0
    assert [line.kind for line in ResidencyTable.at(rank)][-1] == BUFFER


def test_a_trace_at_a_glance_says_what_happened_where_and_when() -> None:
    page = trace_html(engine_trace(ranks=2))
    for told in ("In save, Module.to splits all 21 parameters", "simulated npu", "fails: RuntimeError", "ends well"):
        assert told in page
    assert page == engine_trace(ranks=2)._repr_html_()


def test_a_trace_at_a_glance_says_what_is_missing() -> None:
    whole = engine_trace(ranks=3)
    part = Trace({0: whole[0], 2: whole[2]}, problems=("rank-00007.jsonl: holds no trace",))
    page = trace_html(part)
    assert "no trace of 1 of 3 ranks: 1" in page and "rank-00007.jsonl: holds no trace" in page


def test_names_of_strangers_stay_text_on_the_page() -> None:
    for page in (trace_html(engine_trace(HOSTILE)), table_html(ResidencyTable.at(engine_trace(HOSTILE)[0]))):
        body = page.replace("&times;", "×").partition("</style>")[2]
        ET.fromstring("<div>" + body.removesuffix("</div>") + "</div>")
        assert "<script" not in page and "\x1b" not in page and "\u202e" not in page


def test_a_long_table_is_cut_with_a_count() -> None:
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300)]
    assert "101 further lines are not shown" in table_html(ResidencyTable.at(engine_trace(names)[0]))


def test_a_page_of_a_trace_needs_no_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, 'tests')\n"
        "from traces import engine_trace\n"
        "assert 'simulated' in engine_trace()._repr_html_()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0] + "/..")


def test_a_figure_without_matplotlib_is_one_clear_error() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from diagkit.errors import MissingDependency\n"
        "try:\n    from diagkit.views import residency_map\n"
        "except MissingDependency as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "figures need matplotlib. pip install 'diagkit[report]'.\n"


def test_every_layer_count_reads_the_same() -> None:
    lines = [str(ResidencyTable.at(engine_trace(decoder_names(n))[0])).count("\n") for n in (3, 28)]
    assert lines[0] == lines[1]
