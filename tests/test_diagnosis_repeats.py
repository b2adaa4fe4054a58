"""What comes back, step after step, is told once; and what is too much to be told says so."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from traces import Rank, cause, on

from diagkit.diagnosis import Findings, diagnose
from diagkit.trace import RankTrace, Trace
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, Failure
from diagkit.views.report import render


def steps(names: Sequence[str], rank: int = 0, ranks: int = 1, healthy: int = 0, line: int = 41) -> RankTrace:
    """Phases of these names after so many healthy ones; each moves the model to the device, and the next one back."""
    trace = Rank(["a.0.w"], rank, ranks)
    write = trace.writer.moment
    split, home = on(trace.device, True, "cpu"), on("cpu", True)
    for n in range(1, healthy + 1):
        write(ENTER, "wait: enter", n, trace.parameters(home), key=n == 1, begins={"name": "wait"})
        write(EXIT, "wait: exit", n, [])
    for n, name in enumerate(names, start=healthy + 1):
        write(ENTER, f"{name}: enter", n, trace.parameters(home), key=n == 1, begins={"name": name})
        write(CALL, "Module.to", n, trace.parameters(split), cause=cause("Module.to", line=line))
        write(EXIT, f"{name}: exit", n, [])
    write(ENTER, "end: enter", 900_000, trace.parameters(home), begins={"name": "end"})
    write(EXIT, "end: exit", 900_000, [])
    return trace.read()


@pytest.mark.parametrize("names", [["export"] * 25, [f"step {n}" for n in range(25)]], ids=["same", "numbered"])
def test_the_same_line_in_phase_after_phase_is_one_finding(names: list[str]) -> None:
    trace = steps(names)
    (found,) = diagnose(trace)
    assert (found.code, found.phase, found.lasting) == ("DK101", names[0], False)
    assert "again in 24 later phases like it" in found.evidence
    assert trace.moments[found.moment].phase == 1


def test_once_is_not_again() -> None:
    (found,) = diagnose(steps(["load"]))
    assert not [line for line in found.evidence if "again" in line]


def test_a_phase_of_another_name_has_a_finding_of_its_own() -> None:
    found = diagnose(steps(["save", "export", "save"]))
    assert [(f.phase, sum("again in 1 later phase like it" in line for line in f.evidence)) for f in found] == [
        ("save", 1),
        ("export", 0),
    ]


def test_another_line_has_one_too() -> None:
    ranks = {0: steps(["save"], 0, 2), 1: steps(["save"], 1, 2, line=77)}
    found = [f for f in diagnose(Trace(ranks)) if f.code == "DK101"]
    assert sorted(f.ranks for f in found) == [(0,), (1,)]


def test_the_moment_is_one_of_the_first_rank_also_where_another_rank_was_earlier() -> None:
    late, early = steps(["save"], 0, 2, healthy=6), steps(["save"] * 5, 1, 2, healthy=2)
    (found,) = [f for f in diagnose(Trace({0: late, 1: early})) if f.code == "DK101"]
    assert found.ranks == (0, 1)
    assert late.moments[found.moment].phase == 7


def test_more_findings_than_anybody_reads_are_in_json_alone() -> None:
    letters = [f"{a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    trace = Trace({0: steps(letters)})
    found = diagnose(trace)
    assert len(found) == len(found.to_json()["findings"]) == 100
    for text in (repr(found), found._repr_html_(), render(trace, "md"), render(trace, "html")):
        assert "50 further findings are in JSON only" in text
        assert text.count("DK101") < 200
    assert len(json.loads(render(trace, "json"))["diagnosis"]["findings"]) == 100
    assert not Findings().unshown()


def test_many_failures_beside_many_others_are_told_within_a_tests_time() -> None:
    """Each compared with each, they would take longer than a test may."""
    first, second = (Trace({0: failing(20_000, word)}) for word in ("before", "after"))
    told = render(first, "md", against=second)
    assert "it fails in another way" in told
    assert len(told) < 20_000


def failing(count: int, word: str) -> RankTrace:
    trace = Rank(["a.0.w"])
    trace.writer.moment(ENTER, "save: enter", 1, trace.parameters(on("cpu", True)), key=True, begins={"name": "save"})
    for n in range(count):
        letters = "".join(chr(97 + int(digit)) for digit in str(n))  # a number would be set aside
        trace.writer.moment(FAILURE, "f", 1, [], failure=Failure("ValueError", f"{word} {letters}", "f"))
    return trace.read()
