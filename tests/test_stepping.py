"""A function followed statement by statement."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from diagkit.demo.stepping import follow


def grow(values: list[int], limit: int) -> list[int]:
    for value in (1, 2):
        if value < limit:
            values.append(
                value,
            )  # a statement on several lines
    if limit > 9:
        raise ValueError("too much")
    return values


def test_every_statement_that_ran_is_told_once_a_run_with_what_was_seen_after_it() -> None:
    values: list[int] = []
    steps = follow(grow, lambda: grow(values, 2), lambda local: len(local["values"]))
    assert [step.source for step in steps] == [
        "for value in (1, 2):",
        "if value < limit:",
        "values.append(value)",
        "for value in (1, 2):",
        "if value < limit:",
        "for value in (1, 2):",
        "if limit > 9:",
        "return values",
    ]
    assert [(step.source, step.seen) for step in steps if step.changed] == [("values.append(value)", 1)]


def test_what_the_call_raises_passes_and_who_traced_before_traces_again() -> None:
    def tracer(*_: Any) -> None:
        return None

    def look(_: Mapping[str, Any]) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(ValueError, match="too much"):
            follow(grow, lambda: grow([], 10), look)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_only_the_first_run_is_followed_and_none_is_no_error() -> None:
    values: list[int] = []

    def twice() -> None:
        grow(values, 1)
        grow(values, 3)

    assert not any(step.changed for step in follow(grow, twice, lambda local: len(local["values"])))
    assert follow(grow, lambda: None, lambda local: 0) == []
