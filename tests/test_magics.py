"""`%load_ext diagkit`: the notebook's commands in one kernel, and under `%%px` where the kernels are the ranks."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("IPython")

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parent.parent

SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plain = torch.nn.Linear(1, 1)
"""


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell.instance()
    shell.run_cell(SHARDED).raise_error()
    shell.run_line_magic("load_ext", "diagkit")
    yield shell
    shell.run_line_magic("unload_ext", "diagkit")
    shell.reset(new_session=False)
    import torch.distributed as dist

    dist.destroy_process_group()
    InteractiveShell.clear_instance()


def test_residency_finds_the_model_and_shows_where_its_tensors_are(shell: Any) -> None:
    for line in ("", "model", "model optimizer"):
        view = shell.run_line_magic("residency", line)
        assert {line.pattern for line in view.table} == {"weight", "bias"} or "{" in view.table.lines[0].pattern
        assert view.findings == []
    assert "no residency hazard found" in repr(view)
    assert "<table" in view._repr_html_()


def test_a_recorded_cell_runs_in_the_users_name_space_and_leaves_its_trace(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    value = shell.run_cell_magic("record", "step model", "loss = model(torch.ones(1, 3)).sum()\nloss.backward()\n1 + 1")
    assert value == 2
    assert shell.user_ns["loss"].item() is not None
    trace = shell.user_ns["trace_step"][0]
    assert [phase.name for phase in trace.phases.values()] == ["", "step"]
    assert trace.phases[1].calls["backward end"] == 1
    assert trace.troubles == []
    assert shell.run_cell_magic("record", "step", "2;") is None


def test_a_cell_that_fails_fails_with_its_own_exception_and_its_own_line(shell: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("record", "step", "x = 1\nx / 0")
    failure = shell.user_ns["trace_step"][0].failures[0]
    assert failure.failure.type == "ZeroDivisionError"
    assert failure.cause.frame.line == 2
    assert failure.cause.frame.code == "x / 0"


def test_an_exception_is_explained_from_the_kernels_last_one(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("raise ValueError('wrong batch')")
    said = repr(shell.run_line_magic("explain", ""))
    assert said.startswith("ValueError: wrong batch")
    assert "not an FSDP2 residency problem" in said


def test_guard_and_heal_leave_a_healthy_model_without_a_policy_alone(shell: Any) -> None:
    said = shell.run_line_magic("guard", "model skip")
    assert repr(said) == "<Guard of FSDPLinear, on_move='skip'>"
    assert shell.ev("model.to('cpu') is model")
    for line in ("", "model", "model optimizer --dry-run", "--alone model"):
        healing = shell.run_line_magic("heal", line)
        assert repr(healing) == "nothing to mend" and "nothing to mend" in healing._repr_html_()
    assert "on_move='skip'" in repr(shell.run_line_magic("guard", ""))
    assert shell.run_line_magic("guard", "off") is None
    with pytest.raises(Exception, match="what is to be guarded"):
        shell.run_line_magic("guard", "")


def test_unloading_closes_the_guards(shell: Any) -> None:
    import torch

    before = vars(torch.nn.Module)["_apply"]
    shell.run_line_magic("guard", "model")
    assert vars(torch.nn.Module)["_apply"] is not before
    shell.run_line_magic("unload_ext", "diagkit")
    assert vars(torch.nn.Module)["_apply"] is before
    shell.run_line_magic("load_ext", "diagkit")


MISTAKES = [
    ("residency", "nothing_of_that_name", "no such variable: found nothing_of_that_name"),
    ("guard", "", "what is to be guarded?"),
    ("guard", "model stop", "unknown on_move: found stop, expected raise, skip, warn"),
    ("guard", "plain", "too early to guard: found it is not sharded"),
    ("heal", "nothing_of_that_name", "no such variable: found nothing_of_that_name"),
]


@pytest.mark.parametrize(("command", "line", "said"), MISTAKES)
def test_a_mistake_is_one_line(command: str, line: str, said: str, shell: Any) -> None:
    from IPython.core.error import UsageError

    with pytest.raises(UsageError) as raised:
        shell.run_line_magic(command, line)
    assert str(raised.value).startswith(said)


def test_unloading_takes_every_command_out(shell: Any) -> None:
    before = {kind: set(names) for kind, names in shell.magics_manager.magics.items()}
    shell.run_line_magic("unload_ext", "diagkit")
    after = {kind: set(names) for kind, names in shell.magics_manager.magics.items()}
    assert before["line"] - after["line"] == {"residency", "explain", "guard", "heal"}
    assert before["cell"] - after["cell"] == {"record"}
    shell.run_line_magic("load_ext", "diagkit")


# ---- two kernels that are the ranks of a job

#: What each kernel has said, asked of it: what it prints may come after the cell has ended.
SAID = "print(*client[:]['said'], sep='\\n')"
CELLS = {
    "start": """
        import ipyparallel
        cluster = ipyparallel.Cluster(n=2, log_level=40)
        client = cluster.start_and_connect_sync(activate=True)
        client[:].scatter("rank", range(2), flatten=True)
        client[:]["meet"] = MEET
    """,
    "build": """
        %%px --block
        %load_ext diagkit
        from diagkit.lab import simulate
        simulate()
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
        torch.set_num_threads(1)
        dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{meet}", rank=rank, world_size=2)
        torch.npu.set_device(rank)
        def build():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            for part in (*model, model):
                fully_shard(part, mesh=init_device_mesh("npu", (2,)), offload_policy=CPUOffloadPolicy())
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)
        def step(model, optimizer):
            loss = model(torch.ones(2, 4, device="npu")).square().sum()
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            return loss.item()
        model, optimizer = build()
        losses = [step(model, optimizer)]
    """,
    "healthy": "%%px --block\n%residency model",
    "moved": "%%px --block\n%%record move model optimizer\nmodel.to('npu');",
    "split": "%%px --block\n%residency model",
    "crash": "%%px --block\ntry:\n    model.state_dict()\nexcept RuntimeError as error:\n    last = error\nraise last",
    "explain": "%%px --block\n%explain",
    "plan": "%%px --block\n%heal --dry-run model optimizer",
    "mend": """
        %%px --block
        import diagkit as dk
        said = f"{rank} {dk.heal(model, optimizer).codes}"
    """,
    "heal": SAID,
    "healed": "%%px --block\n%residency model",
    "again": "%%px --block\n%heal",
    "guard": "%%px --block\n%guard model",
    "move": """
        %%px --block
        said = ""
        try:
            model.to("npu")
        except dk.errors.MoveBlocked as error:
            said = f"rank {rank}: {error}"
    """,
    "stopped": SAID,
    "told": "%%px --block\n%guard",
    "off": "%%px --block\n%guard off",
    "train": """
        %%px --block
        losses += [step(model, optimizer) for _ in range(3)]
        twin = build()  # the same model, never moved
        said = f"rank {rank}: {losses == [step(*twin) for _ in range(4)]} {len(set(losses))} {len(model.state_dict())}"
    """,
    "on": SAID,
    "stop": "client.shutdown(hub=True, block=True)",
}


@pytest.fixture(scope="module")
def outputs(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each cell of the notebook showed, as text."""
    pytest.importorskip("ipyparallel")
    import textwrap

    folder = tmp_path_factory.mktemp("px")
    notebook = nbformat.v4.new_notebook()
    meet = tempfile.mktemp(dir=folder)
    for name, source in CELLS.items():
        cell = nbformat.v4.new_code_cell(textwrap.dedent(source).strip().replace("MEET", repr(meet)))
        cell.metadata["tags"] = ["raises-exception"] if name == "crash" else []
        notebook.cells.append(cell)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "IPYTHONDIR": str(folder)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        NotebookClient(
            notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return {name: text(cell) for name, cell in zip(CELLS, notebook.cells, strict=True)}


def text(cell: Any) -> str:
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts.append(output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback", [])))
    return "\n".join(parts)


def test_both_ranks_share_one_table(outputs: dict[str, str]) -> None:
    assert outputs["healthy"].count("tensor ") == 1
    assert "all 2 ranks, simulated npu" in outputs["healthy"]
    assert "no residency hazard found (simulated accelerator)" in outputs["healthy"]


def test_the_split_is_seen_on_both_and_its_cause_is_the_cells_line(outputs: dict[str, str]) -> None:
    for name in ("moved", "split"):
        assert "SPLIT" in outputs[name]
        assert "DK101" in outputs[name]
        assert "ranks: all 2" in outputs[name]
    assert "cause: " in outputs["moved"]
    assert "Module.to -> " in outputs["moved"] and "-> FSDPParam.reset_sharded_param" in outputs["moved"]


def test_the_crash_is_explained_once_for_both(outputs: dict[str, str]) -> None:
    assert outputs["explain"].count("DK101") >= 1
    assert "all 2 ranks: RuntimeError: Attempted to set the storage" in outputs["explain"]


def test_both_ranks_show_one_plan_and_heal_together(outputs: dict[str, str]) -> None:
    assert "all 2 ranks: would mend (simulated accelerator):" in outputs["plan"]
    assert "4 parameters: on the CPU again" in outputs["plan"]
    for rank in (0, 1):
        assert f"{rank} ('DK101',)" in outputs["heal"]
    assert "all 2 ranks: nothing to mend (simulated accelerator)" in outputs["again"]


def test_the_guard_stops_the_move_on_both(outputs: dict[str, str]) -> None:
    assert "all 2 ranks: <Guard of FSDPSequential, on_move='raise'>" in outputs["guard"]
    for rank in (0, 1):
        assert f"rank {rank}: a move of FSDPSequential to npu:{rank} splits its parameters" in outputs["stopped"]
    assert "Module.to npu:0" in outputs["told"] and outputs["off"] == ""


def test_after_the_heal_training_goes_on(outputs: dict[str, str]) -> None:
    assert "SPLIT" not in outputs["healed"]
    assert "DK101" not in outputs["healed"]
    assert all(f"rank {rank}: True 4 4" in outputs["on"] for rank in (0, 1)), outputs["on"]
