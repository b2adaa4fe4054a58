"""The one tree of errors: one line that says what, found, expected, where and what to do."""

from __future__ import annotations

import pathlib
import pickle

import pytest

import diagkit.errors
from diagkit.errors import DiagkitError, TraceError, UsageError

CASES = [
    (UsageError("no ranks"), "no ranks"),
    (UsageError("no ranks", remedy="Ask for one or more"), "no ranks. Ask for one or more."),
    (UsageError("no ranks", remedy="Ask for one or more."), "no ranks. Ask for one or more."),
    (UsageError("bad rank count", found=0, expected="1 or more"), "bad rank count: found 0, expected 1 or more"),
    (TraceError("no trace", where=pathlib.PurePosixPath("runs/a")), "no trace (at runs/a)"),
    (TraceError("no trace", found="a file", where="runs/a"), "no trace: found a file (at runs/a)"),
    (TraceError("torn\nline", found="two\n  lines"), "torn line: found two lines"),
    (DiagkitError("empty", found=""), "empty: found"),
]


@pytest.mark.parametrize(("error", "message"), CASES, ids=[message for _, message in CASES])
def test_a_message_is_one_line_with_all_its_facts(error: DiagkitError, message: str) -> None:
    assert str(error) == message
    assert "\n" not in str(error)


def test_an_error_survives_the_way_to_another_process() -> None:
    error = UsageError("unknown engine", found="x", expected="fsdp", where="--engine", remedy="Choose one")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is UsageError
    assert str(back) == str(error)
    assert (back.found, back.remedy) == ("x", "Choose one")


def test_every_error_belongs_to_the_tree() -> None:
    kinds = [getattr(diagkit.errors, name) for name in diagkit.errors.__all__]
    assert all(issubclass(kind, DiagkitError) and kind.__doc__ for kind in kinds)
