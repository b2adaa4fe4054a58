"""The recorded traces in data/: each is readable, shows what its README says, is small, and tells of no machine."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

import pytest

from diagkit.diagnosis import diagnose
from diagkit.trace import Trace, open_trace

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
#: Bytes of one trace, and of all.
ONE, ALL = 150_000, 600_000


class Told(NamedTuple):
    """A line of the README's table."""

    name: str
    ranks: int
    codes: tuple[str, ...]
    command: str


def promised() -> list[Told]:
    lines = re.findall(r"^\| `([\w.-]+)` \|.*\| (\d+) \| ([\w, -]+) \| `([^`]+)` \|$", README, flags=re.MULTILINE)
    return [
        Told(name, int(ranks), tuple(code for code in codes.split(", ") if code != "none"), command)
        for name, ranks, codes, command in lines
    ]


README = (DATA / "README.md").read_text()
TOLD = promised()


def test_the_table_names_every_folder_and_no_other() -> None:
    assert sorted(told.name for told in TOLD) == sorted(path.name for path in DATA.iterdir() if path.is_dir())
    assert len(TOLD) >= 9


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told.name)
def test_a_trace_shows_what_its_readme_says(told: Told) -> None:
    trace = open_trace(DATA / told.name)
    assert (len(trace), trace.world_size, trace.simulated) == (told.ranks, told.ranks, True)
    assert diagnose(trace).codes == told.codes
    problems = [problem for problem in trace.problems if "was cut off in phase 2 (save)" not in problem]
    assert problems == [] and bool(trace.problems) == (told.name == "rank-killed")


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told.name)
def test_a_trace_can_be_made_again(told: Told) -> None:
    assert told.command == f"python data/record.py {told.name}"


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told.name)
def test_a_trace_is_small_and_tells_of_no_machine(told: Told) -> None:
    files = sorted((DATA / told.name).iterdir())
    assert [file.name for file in files] == [f"rank-{rank:05d}.jsonl" for rank in range(told.ranks)]
    assert sum(file.stat().st_size for file in files) <= ONE
    for file in files:
        text = file.read_text()
        assert not re.findall(r'(?<![\w.~<])/(?:[\w.-]+/)+|\d+\.\d+\.\d+\.\d+(?!\d)|"host":"(?!HOST\d+")', text)


def test_all_of_them_together_are_small() -> None:
    assert sum(file.stat().st_size for file in DATA.rglob("*.jsonl")) <= ALL


@pytest.mark.parametrize("engine", ["fsdp", "veomni"])
def test_guarded_and_unguarded_part_at_the_first_move_of_the_save(engine: str) -> None:
    unguarded, guarded = (open_trace(DATA / f"{engine}-save-{how}") for how in ("unguarded", "guarded"))
    [parting] = unguarded.compare(guarded).partings
    assert (parting.phase_name, parting.ranks) == ("save", (0, 1))
    assert parting.first.startswith("Module.to (") and parting.second.startswith("nothing more changed")
    assert {(d.kind, d.first, d.second) for d in parting.differences} >= {
        ("parameter", "npu/cpu pinned", "cpu/cpu pinned")
    }


def test_a_killed_rank_says_where_it_was(*, name: str = "rank-killed") -> None:
    trace: Trace = open_trace(DATA / name)
    assert (trace[0].ended, trace[1].ended) == ("closed", None)
    assert trace[1].last_phase.name == "save" and trace[0].last_phase.ordinal == 0
