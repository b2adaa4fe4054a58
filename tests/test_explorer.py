"""The explorer without a browser: what a choice shows, that it shows it rightly, and what it writes to disk."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from pages import barriers, watch
from playwright.sync_api import Browser
from traces import decoder_names, engine_trace, unlike_names

import diagkit as dk
from diagkit.errors import UsageError
from diagkit.trace.merged import Trace
from diagkit.trace.schema import Phase, Residency
from diagkit.views import lifeline
from diagkit.views.explorer import Explorer
from diagkit.views.explorer.folding import LINES
from diagkit.views.explorer.panes import cause_pane, state_pane
from diagkit.views.story import cell_of


def two() -> Explorer:
    return dk.explore(engine_trace(ranks=2), engine_trace(ranks=2, guarded=True), names=("Unguarded", "Guarded"))


def test_it_begins_where_the_run_failed() -> None:
    explorer = dk.explore(engine_trace())
    assert repr(explorer) == "<Explorer: Run A · 10 save: state_dict raises>"
    assert dk.explore(engine_trace(guarded=True)).shown.heads == ("Run A · 10 after save",)


def test_it_begins_at_a_finding_where_nothing_failed() -> None:
    explorer = dk.explore(engine_trace(fails=False))
    assert explorer.exploration.findings(0).codes[0] == "DK101"
    assert explorer.choice.moment == explorer.exploration.findings(0)[0].moment


def test_a_trace_opens_its_own_explorer() -> None:
    trace, other = engine_trace(), engine_trace(guarded=True)
    assert repr(trace.explore(other)) == repr(dk.explore(trace, other))


def test_every_moment_shows_the_state_that_the_trace_holds() -> None:
    trace = engine_trace(decoder_names(3), ranks=2)
    explorer = dk.explore(trace)
    for rank in trace:
        for moment in rank.moments:
            shown = explorer.choose(rank=rank.rank, moment=moment.index)
            state = rank.state(moment).facts
            told = {name: cells[0] for line, cells in zip(shown.lines, shown.cells, strict=True) for name in line.names}
            for row in rank.rows:
                if row.kind in ("parameter", "buffer"):
                    facts = rank.facts[state[row.id]]
                    assert told[row.name] == (cell_of(facts) if isinstance(facts, Residency) else None)


def test_a_line_stands_still_while_the_moment_moves() -> None:
    explorer = dk.explore(engine_trace())
    labels = [[line.label for line in explorer.choose(moment=i).lines] for i in range(12)]
    assert all(one == labels[0] for one in labels)


def test_what_moved_at_a_moment_is_marked_there_and_nowhere_else() -> None:
    explorer = dk.explore(engine_trace())
    assert len(explorer.choose(moment=9).changed) == 6, "six lines of parameters, not the buffer"
    assert not explorer.choose(moment=10).changed
    assert len(explorer.choose(moment=2).changed) == 7


def test_two_runs_meet_at_the_same_place_and_what_differs_is_marked() -> None:
    explorer = two()
    shown = explorer.choose(moment=8)
    assert shown.heads == ("Unguarded · rank 0, 8 before save", "Guarded · rank 0, 8 before save")
    assert not shown.apart
    shown = explorer.choose(moment=9)
    assert shown.heads[1] == "Guarded · rank 0, 10 after save", "it made no such call: shown is how the phase ended"
    assert len(shown.apart) == 6
    shown = explorer.choose(run=1, moment=10)
    assert shown.heads == ("Guarded · rank 0, 10 after save", "Unguarded · rank 0, 11 after save")


def test_another_run_has_its_own_findings_and_may_lack_the_tensor() -> None:
    explorer = dk.explore(engine_trace(["a", "b"]), engine_trace(["b"], guarded=True))
    explorer.jump(0)
    assert explorer.choice.tensor == "a" and explorer.choice.finding == 0
    explorer.choose(run=1)
    assert explorer.choice.tensor == "" and explorer.choice.finding is None


def test_tensors_that_one_run_lacks_are_not_there() -> None:
    explorer = dk.explore(engine_trace(["a", "b"]), engine_trace(["b"]))
    shown = explorer.choose(moment=9)
    assert {line.label: cells[1] is None for line, cells in zip(shown.lines, shown.cells, strict=True)}["a"]
    assert "not there" in state_pane(shown)


def test_a_filter_is_a_text_or_a_pattern() -> None:
    explorer = dk.explore(engine_trace())
    assert [line.label for line in explorer.choose(pattern="lm_head").lines] == ["lm_head.weight"]
    names = {name for line in explorer.choose(pattern="*.q_proj.*").lines for name in line.names}
    assert names == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}
    assert explorer.choose(pattern="nothing of the kind").lines == ()
    assert "No tensor has this in its name." in state_pane(explorer.shown)
    assert "nothing to show: found 0 tensors" in explorer.to_html() and "DK101" in explorer.to_html()


def test_a_phase_narrows_the_moments_and_a_moment_outside_becomes_the_nearest() -> None:
    explorer = dk.explore(engine_trace())
    explorer.choose(phase=1)
    assert [m.index for m in explorer.exploration.moments(explorer.choice)] == [0, 1, 2, 3, 4]
    assert explorer.choice.moment == 4


def test_a_jump_goes_to_the_findings_rank_moment_and_tensors() -> None:
    explorer = two()
    shown = explorer.jump(0)
    finding = explorer.exploration.findings(0)[0]
    assert explorer.choice.moment == finding.moment and explorer.choice.rank == finding.ranks[0]
    assert {name for line in shown.lines for name in line.names} == set(finding.names)
    assert explorer.choice.tensor == finding.names[0]
    assert len(explorer.choose(finding=None).lines) == 7


def test_lines_beyond_the_limit_are_counted_and_a_filter_brings_them_up() -> None:
    names = unlike_names(100, 30)
    explorer = dk.explore(engine_trace(names))
    assert len(explorer.shown.lines) == LINES and explorer.shown.left_out == 100 + 1 - LINES
    hidden = set(names) - {name for line in explorer.shown.lines for name in line.names}
    assert [line.label for line in explorer.choose(pattern=min(hidden)).lines] == [min(hidden)]


def test_choices_that_cannot_be_shown_become_the_nearest_that_can() -> None:
    explorer = dk.explore(engine_trace())
    explorer.choose(finding=-1)
    explorer.choose(run=7, rank=99, phase=42, moment=10_000, finding=1000)
    choice = explorer.choice
    assert (choice.run, choice.rank, choice.phase, choice.moment, choice.finding) == (0, 0, None, 11, None)


def test_a_mistake_is_answered_in_one_line(tmp_path: pathlib.Path) -> None:
    explorer = dk.explore(engine_trace())
    with pytest.raises(UsageError, match="nothing of that name can be chosen: found colour, expected one of run, rank"):
        explorer.choose(colour="red")
    with pytest.raises(UsageError, match="no such parameter or buffer: found nothing"):
        explorer.choose(tensor="nothing")
    with pytest.raises(UsageError, match="the ending says what is saved: found view"):
        explorer.save(tmp_path / "view.png")
    with pytest.raises(UsageError, match="cannot write there: found No such file or directory"):
        explorer.save(tmp_path / "nowhere" / "view.svg")
    with pytest.raises(UsageError, match="no trace to draw: found int"):
        dk.explore(7)  # type: ignore[arg-type]


def test_a_cut_off_rank_and_an_empty_trace_can_be_looked_at() -> None:
    trace = engine_trace(ranks=2)
    trace.ranks[1].moments = trace.ranks[1].moments[:3]
    shown = dk.explore(trace).choose(rank=1)
    assert shown.heads == ("Run A · rank 1, 2 init: Module.to",)
    trace.ranks[0].moments = []
    trace.ranks[1].moments = []
    explorer = dk.explore(trace)
    assert explorer.shown.moments == (None,)
    assert "This run never got to this moment" in cause_pane(explorer.shown.moments[0])
    assert "nothing to show: found 22 tensors, 0 moments" in explorer.to_html()
    assert "no residency hazard found" in dk.explore(trace, trace).to_html()


def test_a_stack_is_shown_with_its_culprit() -> None:
    html = cause_pane(dk.explore(engine_trace()).choose(moment=9).moments[0])
    assert "<b>/site/verl/engine.py:41 in save_checkpoint</b>" in html
    assert "<code>load_model_to_device(self.module)</code>" in html


def test_a_tensor_that_is_not_there_in_a_phase_is_shown_where_it_is() -> None:
    explorer = dk.explore(engine_trace())
    explorer.choose(tensor="lm_head")
    rank = explorer.exploration.traces[0][0]
    with pytest.raises(UsageError, match="the tensor is not there in these moments: found lm_head"):
        lifeline(rank, "lm_head", end=0)
    rank.moments[0].phase = 9
    rank.phases[9] = Phase(9, "before")
    explorer.choose(phase=9)
    assert explorer.choice.moment == 0
    assert "splits lm_head.weight" in explorer.to_svg()


def test_the_chosen_moment_is_marked_in_the_lifeline() -> None:
    explorer = dk.explore(engine_trace())
    explorer.choose(tensor="lm_head", moment=9)
    before = explorer.to_svg()
    explorer.choose(moment=10)
    assert before != explorer.to_svg() and before.count("<polygon") == explorer.to_svg().count("<polygon") == 1


def test_hostile_names_are_shown_as_text() -> None:
    names = ["<script>alert(1)</script>", 'a"onmouseover="alert(1)', "a\x1b[31mred", "a\u202egnp.exe"]
    explorer = dk.explore(engine_trace(names))
    explorer.choose(tensor=names[0])
    for form in (explorer.to_html(), explorer.to_svg(), state_pane(explorer.shown)):
        assert "<script" not in form and "\x1b" not in form and "\u202e" not in form
        assert not re.search(r"<[^>]*onmouseover", form)


def test_the_picture_is_the_lifeline_of_a_tensor_or_the_map(tmp_path: pathlib.Path) -> None:
    explorer = two()
    svg = ET.fromstring(explorer.save(tmp_path / "map.svg").read_text())
    assert (svg.get("aria-label") or "").startswith("Unguarded, save splits all 21 parameters; guarded")
    explorer.choose(tensor="lm_head", phase=3)
    svg = ET.fromstring(explorer.save(tmp_path / "life.svg").read_text())
    assert (
        svg.get("aria-label") == "In save, Module.to splits lm_head.weight: metadata says npu:0, the bytes are on cpu"
    )


@pytest.mark.browser
def test_the_page_opens_from_disk_without_a_request_an_error_or_a_barrier(
    browser: Browser, tmp_path: pathlib.Path
) -> None:
    file = two().save(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    console, outside = watch(page, file.as_uri())
    page.goto(file.as_uri())
    assert page.get_by_role("heading", name="Where everything was").is_visible()
    assert page.get_by_role("img", name="In save, Module.to splits model.embed_tokens.weight").is_visible()
    assert page.get_by_text("DK101").first.is_visible()
    for width in (1200, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert not barriers(page)
    page.close()
    assert not console and not outside


def test_the_model_needs_neither_ipywidgets_nor_torch() -> None:
    code = (
        "import sys; sys.modules.update({'ipywidgets': None, 'torch': None, 'IPython': None})\n"
        f"sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"
        "from traces import engine_trace; import diagkit as dk\n"
        "explorer = dk.explore(engine_trace()); explorer.choose(moment=3); print(len(explorer.to_html()))\n"
        "try: explorer.widget\n"
        "except dk.errors.MissingDependency as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the explorer needs ipywidgets" in done.stdout


def test_a_trace_with_one_rank_of_many_is_explored_by_its_path_too(tmp_path: pathlib.Path) -> None:
    explorer = dk.explore(Trace({1: engine_trace(ranks=2)[1]}))
    assert explorer.choice.rank == 1


@pytest.mark.browser
@pytest.mark.slow
def test_a_notebook_turned_into_a_page_shows_the_static_view_where_no_kernel_runs(
    browser: Browser, tmp_path: pathlib.Path
) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"
        "from traces import engine_trace; import diagkit as dk\n"
        "dk.explore(engine_trace())"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    file = tmp_path / "explorer.html"
    file.write_text(HTMLExporter().from_notebook_node(notebook)[0])
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
    page.goto(file.as_uri())
    assert page.get_by_role("img", name="In save, Module.to splits all 21 parameters").is_visible()
    assert page.get_by_text("DK101").first.is_visible()
    page.screenshot(path=tmp_path / "static.png", full_page=True)
    page.close()
