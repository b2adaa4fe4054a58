"""A small job on the CPU, made of operations that an interrupt may cut short one by one, and what is left of it."""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import diagkit as dk
from diagkit.capture import Recorder
from diagkit.trace import open_trace
from diagkit.trace.schema import PARAMETER, Residency


class Job:
    """A model, its optimizer, and the operations of a training script."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.interrupted = 0
        self.left = False  # an interrupt left the recording's block, or never entered it
        self.saved = 0

    def run(self, folder: pathlib.Path, detail: str) -> None:
        """All operations, recorded; an interrupt ends the one that it strikes."""
        try:
            with dk.record(self.model, self.optimizer, out=folder, detail=detail) as recorder:
                for operation in self._operations(recorder):
                    try:
                        operation()
                    except KeyboardInterrupt:
                        self.interrupted += 1
        except KeyboardInterrupt:
            self.interrupted += 1
            self.left = True

    def save(self, *signal: object) -> None:
        """What the handler of a signal does before a node is taken away."""
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), io.BytesIO())
        self.model.double().float()
        self.saved += 1

    def _operations(self, recorder: Recorder) -> list[Callable[[], Any]]:
        model, optimizer = self.model, self.optimizer
        return [
            lambda: self._train(recorder),
            model.double,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: list(recorder.exported(model.state_dict().items())),
            lambda: model.register_buffer("late", torch.ones(1)),
            self._fail,
            model.float,
        ]

    def _train(self, recorder: Recorder) -> None:
        with recorder.phase("train"):
            self.model(torch.ones(3, 4)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _fail(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.model.load_state_dict({"nonsense": torch.ones(1)})

    def told_wrong(self, folder: pathlib.Path) -> list[str]:
        """What is wrong with the trace."""
        [trace] = open_trace(folder)
        if self.left and not trace.moments:
            return []  # cut off before it began
        wrong = [*trace.problems, *trace.troubles]
        if trace.ended != "closed":
            wrong.append(f"ended {trace.ended}")
        last = trace.state(-1)
        facts = {row.name: trace.facts[last.facts[row.id]] for row in trace.rows if row.kind == PARAMETER}
        told = {name: fact.dtype for name, fact in facts.items() if isinstance(fact, Residency)}
        true = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.model.named_parameters()}
        right = told == true or (self.left and told.items() <= true.items())  # it may have ended before it looked
        return wrong if right else [*wrong, f"told {told}, true is {true}"]
