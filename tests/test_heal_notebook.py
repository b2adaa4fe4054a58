"""A notebook in which a backward pass breaks off: training seems to go on and is dead, and one line revives it (DK604).

Real cells in a real kernel, as somebody would write them who catches an exception and goes on.
"""

from __future__ import annotations

import os
import pathlib
import textwrap

import pytest

pytest.importorskip("IPython")

import nbformat
from nbclient import NotebookClient
from test_magics import text

from diagkit.torch_internals import torch_version

ROOT = pathlib.Path(__file__).resolve().parent.parent

CELLS = {
    "build": """
        %load_ext diagkit
        import diagkit as dk
        import torch, torch.distributed as dist
        from diagkit.lab import simulate
        simulate(announce=False)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
        torch.set_num_threads(1)
        dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)

        def build():
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
            for part in (*model, model):
                fully_shard(part, mesh=init_device_mesh("npu", (1,)), offload_policy=CPUOffloadPolicy())
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(model, optimizer):
            loss = model(torch.ones(2, 4, device="npu")).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        (model, optimizer), twin = build(), build()
        losses, expected = [step(model, optimizer)], [step(*twin)]
    """,
    "exception": """
        def mistake(*_):
            raise ValueError("a mistake in a hook of mine")

        handle = model[1].register_full_backward_hook(mistake)
        try:
            step(model, optimizer)
        except ValueError as error:
            print("caught:", error)
        handle.remove()
        optimizer.zero_grad()
    """,
    "goes on": """
        before = [p.to_local().clone() for p in optimizer.param_groups[0]["params"]]
        try:
            for _ in range(2):
                model(torch.ones(2, 4, device="npu")).square().sum().backward()
            optimizer.step()
        except RuntimeError as error:
            print("raised:", error)
        after = [p.to_local() for p in optimizer.param_groups[0]["params"]]
        arrived = sum(p.grad is not None for p in optimizer.param_groups[0]["params"])
        print("gradients:", arrived, "unchanged:", all(torch.equal(a, b) for a, b in zip(before, after)))
    """,
    "inspect": "dk.inspect(model, optimizer)",
    "plan": "%heal --dry-run model optimizer",
    "heal": "print(dk.heal(model, optimizer))",
    "healthy": "print(dk.inspect(model, optimizer).findings)",
    "parity": """
        losses += [step(model, optimizer) for _ in range(5)]
        expected += [step(*twin) for _ in range(5)]
        print(losses == expected, len(set(losses)))
    """,
    "guard": "%guard model skip",
    "move": "print(model.npu() is model, {str(p.device) for p in model.parameters()})",
    "off": "%guard off",
    "stopped": """
        with dk.guard(model):
            try:
                model.npu()
            except dk.errors.MoveBlocked as error:
                print(error)
                print(dk.explain())
    """,
}


@pytest.fixture(scope="module")
def outputs(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each cell showed, as text."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook()
    notebook.cells += [nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in CELLS.values()]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        assert os.environ["PYTHONPATH"] == str(ROOT)
        NotebookClient(
            notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
    return {name: text(cell) for name, cell in zip(CELLS, notebook.cells, strict=True)}


def test_after_the_exception_no_gradient_reaches_the_optimizer_and_nothing_says_so(outputs: dict[str, str]) -> None:
    assert outputs["exception"].strip() == "caught: a mistake in a hook of mine"
    *raised, rest = outputs["goes on"].strip().splitlines()
    assert rest == "gradients: 0 unchanged: True"
    assert len(raised) == (torch_version() < (2, 11))  # the next forward of older ones does say so
    assert all("got mixed torch.Tensor and DTensor" in line for line in raised)


def test_inspect_says_that_training_is_dead(outputs: dict[str, str]) -> None:
    assert "DK604 Aborted backward: gradients no longer reach the optimizer [silent]" in outputs["inspect"]


def test_the_plan_is_shown_and_done(outputs: dict[str, str]) -> None:
    assert outputs["plan"].startswith(
        "would mend (simulated accelerator):\n  a backward pass that an exception broke off"
    )
    assert outputs["heal"].startswith("mended (simulated accelerator):\n  a backward pass that an exception broke off")
    assert outputs["healthy"].strip() == "no residency hazard found (simulated accelerator)"


def test_five_steps_later_it_is_the_run_that_never_broke(outputs: dict[str, str]) -> None:
    assert outputs["parity"].strip() == "True 6"


def test_a_guard_for_the_rest_of_the_notebook_is_one_line(outputs: dict[str, str]) -> None:
    assert "<Guard of FSDPSequential, on_move='skip'>" in outputs["guard"]
    assert outputs["move"].strip() == "True {'cpu'}"


def test_a_guard_names_the_line_of_a_cell_and_not_the_file_that_the_kernel_made_of_it(outputs: dict[str, str]) -> None:
    assert "(at notebook, line 3: model.npu()). Leave" in outputs["stopped"]
    assert "delete the move at notebook, line 3: model.npu()." in outputs["stopped"]
