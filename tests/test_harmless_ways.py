"""Gradient accumulation, checkpointing, mixed precision, frozen parameters: each in every way of watching it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
KINDS = (
    "accumulation",
    "checkpointing, not reentrant",
    "checkpointing, reentrant",
    "mixed precision",
    "frozen",
    "gathered until backward",
)
RESULTS = ("losses", "saved", "weights", "optimizer", "exported", "random")
Told = dict[str, dict[str, dict[str, Any]]]  # by kind and way


@pytest.fixture(scope="module")
def told(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("ways")
    [result] = run_ranks(HERE / "harmless_ways.py", 1, args=[str(folder)], timeout=280)
    found: Told = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", ["phases", "transitions", "full", "attach", "auto", "bare again"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_watched_computes_what_it_computes_alone(told: Told, kind: str, way: str) -> None:
    bare, watched = told[kind]["bare"], told[kind][way]
    assert [result for result in RESULTS if watched[result] != bare[result]] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_way_leaves_anything_behind_or_says_anything(told: Told, kind: str) -> None:
    for way, found in told[kind].items():
        before, after = found["belongings"]
        assert (way, found["left"], found["warned"], after) == (way, [], [], before)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trace_is_whole(told: Told, kind: str) -> None:
    traces = {way: found["trace"] for way, found in told[kind].items() if found["trace"]}
    assert {way: (t["problems"], t["troubles"], t["ended"]) for way, t in traces.items()} == dict.fromkeys(
        ("phases", "transitions", "full", "attach", "auto"), ([], [], "closed")
    )
    moments = {way: trace["moments"] for way, trace in traces.items()}
    assert 3 < moments["phases"] < moments["transitions"] < moments["full"]


def test_the_kinds_are_different_trainings(told: Told) -> None:
    assert set(told) == set(KINDS)
    plain = told["gathered until backward"]["bare"]
    assert told["checkpointing, reentrant"]["bare"]["losses"] == plain["losses"]  # recomputed, not changed
    assert len({told[kind]["bare"]["weights"] for kind in ("mixed precision", "frozen", "accumulation")}) == 3
