"""Whose line a cause names when the model has a ``to`` of its own, as every transformers model has."""

from __future__ import annotations

from types import CodeType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diagkit.capture.cause import _cause  # noqa: E402


class OwnTo(torch.nn.Linear):  # type: ignore[misc, name-defined]
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return super().to(*args, **kwargs)

    def prepare(self) -> None:
        self.to("cpu")


def to(model: OwnTo) -> None:
    model.to("cpu")


def caller() -> None:
    OwnTo(1, 1).prepare()


TO = torch.nn.Module.to.__code__


@pytest.mark.parametrize(
    ("stack", "named", "chain"),
    [
        ([caller, OwnTo.to], "caller", ("caller", "OwnTo.to", "Module.to")),
        ([caller, OwnTo.prepare], "OwnTo.prepare", ("caller", "OwnTo.prepare", "Module.to")),
        ([caller, to], "to", ("caller", "to", "Module.to")),
        ([OwnTo.to], "OwnTo.to", ("OwnTo.to", "Module.to")),
    ],
    ids=[
        "its own to is passed over",
        "any other method is not",
        "nor a function of that name",
        "unless nobody else is there",
    ],
)
def test_the_line_that_called_is_named(stack: list[Any], named: str, chain: tuple[str, ...]) -> None:
    found: list[tuple[CodeType, int, bool]] = [(function.__code__, 1, True) for function in stack]
    cause = _cause("Module._apply", [], "model", [*found, (TO, 1, True)], known_base=False)
    assert cause.frame is not None
    assert cause.frame.function.rpartition(".")[2] == named.rpartition(".")[2]
    assert [name.rpartition(".")[2] for name in cause.chain] == [name.rpartition(".")[2] for name in chain]
