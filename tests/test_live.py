"""`dk.inspect` and `dk.explain` in this very process: plain models, engines of any make, and no exception at all."""

from __future__ import annotations

import builtins
import pathlib
import sys
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import diagkit as dk
from diagkit.errors import UsageError


class Engine:
    def __init__(self) -> None:
        self.name = "mine"
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.opt = torch.optim.AdamW(self.net.parameters())


def test_a_plain_model_has_a_table_and_nothing_to_find() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found = dk.inspect(model)
    assert not found.findings and found.prediction is None
    text = repr(found)
    assert "no residency hazard found" in text
    assert "{0,1}.{weight,bias} ×4" in text and "cpu" in text
    assert "<table>" in found._repr_html_() and "no residency hazard found" in found._repr_html_()


def test_an_engine_of_any_make_is_looked_into() -> None:
    found = dk.inspect(Engine())
    assert len(found.table.lines) >= 1
    assert {row.name for row in found.trace.rows if row.kind == "parameter"} == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip
    assert any(row.kind == "optimizer" for row in found.trace.rows)


def test_several_models_are_told_apart() -> None:
    found = dk.inspect({"actor": nn.Linear(1, 1), "critic": nn.Linear(1, 1)})
    assert {row.model for row in found.trace.rows} == {"actor", "critic"}


@pytest.mark.parametrize("thing", [3, "model", object(), [], {}, None])
def test_nothing_to_inspect(thing: object) -> None:
    with pytest.raises(UsageError, match="nothing to inspect"):
        dk.inspect(thing)


def test_meta_parameters_are_found_in_any_model() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    (finding,) = dk.inspect(model).findings
    assert finding.code == "DK104" and finding.names == ("weight", "bias")


def test_no_exception_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    with pytest.raises(UsageError, match="no exception to explain"):
        dk.explain()


@pytest.mark.parametrize("thing", [5, "RuntimeError: x", RuntimeError, nn.Linear(1, 1), 0])
def test_what_is_no_exception_is_not_explained(thing: object) -> None:
    with pytest.raises(UsageError, match=r"no exception to explain: found .*expected an exception"):
        dk.explain(thing)  # type: ignore[arg-type]


class Group(Exception):
    """As Python 3.11's, which 3.10 lacks."""

    def __init__(self, text: str, exceptions: list[Exception]) -> None:
        super().__init__(text)
        self.exceptions = tuple(exceptions)


def test_what_is_no_tensor_among_the_buffers_is_no_problem() -> None:
    model = nn.BatchNorm1d(4)
    model._buffers["count"] = 3  # type: ignore[assignment]
    looked = dk.inspect(model)
    assert looked.findings.problems == () and not looked.findings
    assert [line.pattern for line in looked.table if line.kind == "buffer"] != []
    assert "count" not in [line.pattern for line in looked.table]


@pytest.mark.parametrize("nested", [False, True])
def test_a_group_is_looked_into(nested: bool) -> None:
    text = "Tensor.item() cannot be called on meta tensors"
    errors: list[Exception] = [ValueError("first")]
    try:
        torch.zeros(1, device="meta").item()
    except RuntimeError as error:
        errors.append(error)
    kind = getattr(builtins, "ExceptionGroup", Group)
    group = kind("outer", [kind("inner", errors)] if nested else errors)
    assert text in dk.explain(group).error and "test_live.py" in dk.explain(group).where
    unknown = kind("outer", errors[:1])
    assert dk.explain(unknown).error.startswith(f"{kind.__name__}: outer")


def test_the_last_exception_of_a_session_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        kept = error
    monkeypatch.setattr(sys, "last_exc" if sys.version_info >= (3, 12) else "last_value", kept, raising=False)
    found = dk.explain()
    assert found.code is None and "RuntimeError" in found.error and "test_live.py" in found.where


class Nasty:
    """Everything about it raises."""

    def __getattribute__(self, name: str) -> object:
        raise ZeroDivisionError(name)

    def __str__(self) -> str:
        raise ZeroDivisionError


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_objects_that_raise_at_every_touch_are_passed_over() -> None:
    nasty = Nasty()
    loop: list[object] = [nasty]
    loop.append(loop)
    text = "Attempted to set the storage of a tensor on device cpu to a storage on different device npu:0"

    def fail(thing: object, things: list[object], deep: dict[str, object]) -> None:
        raise RuntimeError(text)

    try:
        fail(nasty, loop, {"a": {"b": {"c": loop}}})
    except RuntimeError as error:
        found = dk.explain(error)
    assert found.code is None and found.notes
    assert dk.explain(Mute()).code is None


def test_explaining_keeps_nothing_alive() -> None:
    import gc
    import weakref

    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    try:
        model(torch.zeros(3, 3))
    except RuntimeError as error:
        dk.explain(error)
    del model
    gc.collect()
    assert gone() is None


class Preconditioned(torch.optim.Optimizer):
    """Keeps tensors in lists, tuples and dicts, as SOAP, Shampoo and LBFGS do."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                factors = [torch.eye(2), torch.eye(3, dtype=torch.float64)]
                state = {"GG": factors, "m": torch.zeros(1), "deep": {"pair": (torch.ones(1), None)}, "n": 3}
                self.state[parameter] = state


def test_tensors_in_lists_of_an_optimizers_state_are_looked_at(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Preconditioned(model.parameters())
    optimizer.step()
    with dk.record(model, optimizer, out=tmp_path) as rec:
        with rec.phase("a"):
            optimizer.state[model.weight]["GG"][0] = torch.eye(2, dtype=torch.bfloat16)
        with rec.phase("b"):
            del optimizer.state[model.weight]["GG"][1], optimizer.state[model.weight]["deep"]
    rank = dk.open_trace(tmp_path)[0]
    rows = {row.part: row.id for row in rank.rows if row.kind == "optimizer_state"}
    assert list(rows) == ["GG.0", "GG.1", "deep.pair.0", "m"]

    def types(moment: str) -> list[str]:
        state = rank.state(next(m for m in rank.moments if m.label == moment))
        return [getattr(rank.facts[state.facts[row]], "dtype", "gone") for row in rows.values()]

    assert types("start") == ["float32", "float64", "float32", "float32"]
    assert types("a: exit") == ["bfloat16", "float64", "float32", "float32"]
    assert types("b: exit") == ["bfloat16", "gone", "gone", "float32"]
    assert rank.troubles == []


def test_tensors_beside_numbers_in_an_optimizers_state_are_looked_at(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    state = optimizer.state[model.weight]
    state.update(n=1, m=torch.zeros(1))
    with dk.record(model, optimizer, out=tmp_path) as rec:
        with rec.phase("a"):
            state["n"] = 2
        with rec.phase("b"):
            state["m"] = torch.zeros(1, dtype=torch.bfloat16)
    rank = dk.open_trace(tmp_path)[0]
    (row,) = (row.id for row in rank.rows if row.kind == "optimizer_state")
    told = [(m.label, rank.facts[c.facts]) for m in rank.moments for c in m.changes if c.start == row]
    assert [(label, getattr(facts, "dtype", "")) for label, facts in told] == [
        ("start", "float32"),
        ("b: exit", "bfloat16"),
    ]
