"""Cells: a state is provoked and an operation done, in processes that live for nothing else.

Operations that leave the state as it was, by every fact, follow one another in the same processes; the next one after a
change gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from torch import Tensor
from torch.distributed.tensor import DTensor

from diagkit.demo.predictions.bench import Bench, Kind, build
from diagkit.demo.predictions.forked import Answer, fork_ranks
from diagkit.demo.predictions.operations import attempt
from diagkit.demo.predictions.states import State
from diagkit.diagnosis.predictions.facets import Facets
from diagkit.diagnosis.predictions.lookup import OPERATIONS, Cell
from diagkit.errors import SimulatorError


def run_state(
    kind: Kind, state: State, ranks: int, device: str = "npu", alone: bool = False, timeout: float = 60
) -> tuple[Facets, dict[str, Cell]]:
    """Every operation in this state: the state's facets (rank 0's), and what each operation did on all ranks.

    ``alone``: each operation in processes of its own. Ranks that disagree make a cell of their own kind.

    Raises:
        SimulatorError: the ranks did not bring the state about.
    """
    left = list(OPERATIONS)
    found: dict[str, Cell] = {}
    key: Facets | None = None
    while left:
        tried = left[:1] if alone else left
        answers = fork_ranks(_work(kind, state, device, tried), ranks, device, state.group, timeout)
        facets = [Facets(**a["facets"]) for a in answers if a and a.get("facets")]
        if len(facets) < ranks:
            told = next((a["error"] for a in answers if a and a.get("error")), "no answer")
            raise SimulatorError(f"the state {state.name!r} did not come about", found=told)
        key = facets[0]
        done = min(len(a["cells"]) for a in answers if a)
        if done == 0:  # a rank hung or died in the operation
            found[left.pop(0)] = Cell("crash", "no answer")
        for i in range(done):
            cells = {Cell(*a["cells"][i]) for a in answers if a}
            found[left.pop(0)] = cells.pop() if len(cells) == 1 else Cell("crash", "ranks disagree: " + str(cells))
    assert key is not None
    return key, found


def _work(
    kind: Kind, state: State, device: str, operations: list[str]
) -> Callable[[int, Callable[[Answer], None]], None]:
    def work(rank: int, tell: Callable[[Answer], None]) -> None:
        bench = provoke(kind, state, device)
        answer: Answer = {"facets": asdict(bench.facets()), "cells": []}
        tell(answer)
        for cell in _attempts(bench, operations):
            answer["cells"].append([cell.outcome, cell.error])
            tell(answer)

    return work


def provoke(kind: Kind, state: State, device: str = "npu") -> Bench:
    """A bench in this state; the ranks of the process group call it together."""
    bench = build(kind, state.policy, device, state.on_meta)
    for step in state.recipe:
        step(bench)
    return bench


def _attempts(bench: Bench, operations: list[str]) -> Iterator[Cell]:
    before = _everything(bench)
    for operation in operations:
        yield attempt(bench, operation)
        if _everything(bench) != before:
            return


def _everything(bench: Bench) -> list[object]:
    from diagkit.capture import snapshot

    rank = snapshot(bench.model, bench.optimizer)
    return [*(rank.facts[n] for n in rank.state(-1).facts), [_address(p) for p in bench.model.parameters()]]


def _address(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
