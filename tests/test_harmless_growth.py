"""Long runs, many recordings and many threads: nothing grows, and nothing is left of what came and went."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from ways import left_behind, observed  # noqa: E402

import diagkit as dk  # noqa: E402
from diagkit.capture import hooks  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
DETAILS = ("phases", "transitions", "full")
Told = dict[str, dict[str, dict[str, Any]]]  # by detail


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("growth")
    [result] = run_ranks(HERE / "harmless_growth.py", 1, args=[str(folder)], timeout=290)
    found: Told = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("detail", DETAILS)
def test_step_two_thousand_costs_what_step_three_hundred_did(told: Told, detail: str) -> None:
    run = told[detail]["run"]
    assert run["steps"] == 2000
    early, late = run["calls"]
    assert early == late > 1000
    (lines, early_bytes), (late_lines, late_bytes) = run["written"]
    assert lines == late_lines and early_bytes <= late_bytes < 1.05 * early_bytes  # numbers have grown a digit


@pytest.mark.slow
@pytest.mark.parametrize("detail", DETAILS)
def test_after_two_thousand_steps_there_is_no_object_more(told: Told, detail: str) -> None:
    early, late = told[detail]["run"]["objects"]
    assert early == late


@pytest.mark.slow
@pytest.mark.parametrize("detail", DETAILS)
def test_two_hundred_recordings_leave_no_object_and_no_descriptor_and_hold_no_model(told: Told, detail: str) -> None:
    found = told[detail]["recordings"]
    assert found["objects"][0] == found["objects"][1]
    assert found["belongings"][0] == found["belongings"][1]
    assert (found["alive"], told[detail]["left"]) == (0, [])


class Trainer:
    """A small model of its own for each thread."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = torch.Generator().manual_seed(seed)

    def train_batch(self) -> str:
        """The loss, exactly; the model is moved and saved on the way."""
        loss = self.model(torch.rand(3, 4, generator=self.batches)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.double().float()
        self.model.load_state_dict(self.model.state_dict())
        return loss.item().hex()


@pytest.fixture
def untouched() -> Iterator[None]:
    """Before and after, every place that is patched holds the identical object."""
    before = observed()
    yield
    assert left_behind(before) == []


def test_threads_train_undisturbed_while_another_attaches_records_and_guards_two_hundred_times(
    untouched: None, tmp_path: pathlib.Path
) -> None:
    steps, turns = 60, 200
    trainers = {seed: Trainer(seed) for seed in range(3)}
    alone = {seed: [trainer.train_batch() for _ in range(steps)] for seed, trainer in trainers.items()}
    trainers = {seed: Trainer(seed) for seed in range(3)}
    together: dict[int, list[str]] = {}
    faults: list[BaseException] = []
    done = threading.Event()

    def train(seed: int) -> None:
        try:
            losses = together[seed] = []
            while len(losses) < steps or not done.is_set():
                losses.append(trainers[seed].train_batch())
        except BaseException as error:
            faults.append(error)

    def asked(module: nn.Module, fn: Any, recurse: bool) -> None:
        """A gate as a guard has one, with no say in any of these models."""

    def come_and_go() -> None:
        try:
            for turn in range(turns):
                trainer = trainers[turn % 3]
                hooks.add_gate(asked)
                with dk.attach(trainer, detail=DETAILS[turn % 3]):
                    if turn % 10 == 0:
                        with dk.record(trainer.model, trainer.optimizer, out=tmp_path / str(turn), detail="full"):
                            hooks.remove_gate(asked)
                hooks.remove_gate(asked)
        except BaseException as error:
            faults.append(error)
        finally:
            done.set()

    threads = [threading.Thread(target=train, args=(seed,)) for seed in trainers]
    threads.append(threading.Thread(target=come_and_go))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults == [] and not any(thread.is_alive() for thread in threads)
    assert {seed: losses[:steps] for seed, losses in together.items()} == alone
    assert not any("train_batch" in vars(trainer) for trainer in trainers.values())
