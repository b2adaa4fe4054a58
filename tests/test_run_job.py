"""`torchrun ... -m diagkit run` on a script written without a thought of diagkit: the same job, and an explanation.

Real ranks on the simulated accelerator. Each pair of runs (with and without diagkit) is started once for all tests.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from diagkit.diagnosis import diagnose
from diagkit.trace import Trace, open_trace

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOBS = ROOT / "tests" / "jobs" / "train"
# What `diagkit run --simulate` does beside recording, for the run without it.
SIMULATED = "from diagkit.lab import simulate; simulate(); import runpy, sys; sys.argv = sys.argv[1:]; import os; "
SIMULATED += "sys.path.insert(0, os.path.dirname(sys.argv[0])); runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Run:
    """One job: how its ranks ended, what they said, what they saved."""

    codes: list[int]
    losses: list[str]
    stderr: str
    checkpoints: dict[str, dict[str, torch.Tensor]]
    trace: Trace | None


def run(folder: pathlib.Path, script: str, *words: str, recorded: bool, launcher: bool = False) -> Run:
    ours = ["run", "--simulate", "--out", str(folder / "runs"), str(JOBS / script)]
    job = ["--checkpoint", str(folder / "saved"), *words]
    plain = folder / "plain.py"
    plain.write_text(SIMULATED)
    if launcher:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*torchrun, "-m", "diagkit", *ours, *job]
        one = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
        codes, out, err = [one.returncode], one.stdout, one.stderr
    else:
        start, args = (ROOT / "diagkit" / "__main__.py", ours) if recorded else (plain, [str(JOBS / script)])
        ranks = run_ranks(start, 2, args=[*args, *job], check=False, timeout=150)
        codes, out, err = [r.rc for r in ranks], "".join(r.stdout for r in ranks), "".join(r.stderr for r in ranks)
    checkpoints = {at.parent.name: load(at.parent) for at in sorted(folder.glob("saved*/.metadata"))}
    trace = open_trace(folder / "runs") if (folder / "runs").exists() else None
    # Ranks under one launcher share a pipe: their lines may run into each other.
    return Run(codes, sorted(re.findall(r"rank \d step \d loss \d\.\d{9}", out)), err, checkpoints, trace)


def load(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    described = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size) for n, m in described.items() if not isinstance(m, BytesStorageMetadata)}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


@pytest.fixture(scope="module", autouse=True)
def built(compiler: str) -> None:
    subprocess.run([sys.executable, "-c", "from diagkit.lab import simulate; simulate()"], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("crashed"), "offload.py", "--place", recorded=True, launcher=True)


@pytest.fixture(scope="module", params=["offload.py", "qwen.py"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The repaired job without diagkit and with it."""
    if request.param == "qwen.py":
        pytest.importorskip("transformers")
    plain, recorded = (run(tmp_path_factory.mktemp("job"), request.param, recorded=r) for r in (False, True))
    return plain, recorded


def test_the_script_leaves_with_its_own_code_and_its_own_words(crashed: Run) -> None:
    assert crashed.codes == [1]  # torchrun's, for a rank that failed
    assert "exitcode  : 7" in crashed.stderr
    assert len(crashed.losses) == 6


def test_one_rank_explains_in_full_and_the_others_in_a_line(crashed: Run) -> None:
    said = [line for line in crashed.stderr.splitlines() if "diagkit: rank" in line]
    assert said
    assert all("DK101" in line for line in said)
    assert crashed.stderr.count("remedy:") == 1
    assert f"{JOBS / 'placing.py'}:11: module.to(device)" in crashed.stderr
    assert crashed.stderr.count("(simulated accelerator)") >= len(said)


def test_the_trace_names_the_line_on_both_ranks(crashed: Run) -> None:
    assert crashed.trace is not None
    for rank in (0, 1):
        (finding,) = diagnose(crashed.trace[rank])
        assert finding.code == "DK101"
        assert finding.cause is not None
        assert str(finding.cause) == (
            "placing.py:11 _move: main -> place -> _move -> Module.to -> FSDPParam.reset_sharded_param"
        )
        assert finding.cause.frame is not None
        assert finding.cause.frame.code == "module.to(device)"
        assert crashed.trace[rank].troubles == []
    assert diagnose(crashed.trace)[0].ranks == (0, 1)
    assert crashed.trace.header.run == crashed.trace[1].header.run


def test_the_repaired_job_is_the_same_with_and_without_diagkit(pair: tuple[Run, Run]) -> None:
    plain, recorded = pair
    assert plain.codes == recorded.codes == [0, 0], plain.stderr + recorded.stderr
    assert len(plain.losses) == 6
    assert recorded.losses == plain.losses
    assert recorded.checkpoints.keys() == plain.checkpoints.keys() != set()
    for name, tensors in plain.checkpoints.items():
        assert recorded.checkpoints[name].keys() == tensors.keys() != set()
        assert all(torch.equal(recorded.checkpoints[name][key], tensors[key]) for key in tensors)


def test_the_repaired_job_has_no_finding_and_says_where_its_trace_is(pair: tuple[Run, Run]) -> None:
    _, recorded = pair
    trace = recorded.trace
    assert trace is not None
    assert diagnose(trace) == []
    assert trace.problems == []
    assert [rank.troubles for rank in trace] == [[], []]
    (line,) = [line for line in recorded.stderr.splitlines() if "diagkit" in line]
    assert line == f"diagkit: trace: {trace.path} (simulated accelerator)"
    calls = [moment.label for moment in trace[0].moments]
    assert {"model found", "first forward", "Optimizer.step", "get_model_state_dict", "dcp.save"} <= set(calls)
    assert calls.count("dcp.save") == len(recorded.checkpoints)


def test_a_qwen_that_is_moved_crashes_and_the_line_is_named_on_both_ranks(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    crashed = run(tmp_path, "qwen.py", "--place", recorded=True)
    assert crashed.codes == [1, 1]
    assert crashed.trace is not None
    # Its decoder is no FSDP2 module: the embedding was moved past FSDP2's reset, the layers inside through it.
    first, second = diagnose(crashed.trace)[:2]
    assert [(one.code, one.ranks) for one in (first, second)] == [("DK101", (0, 1)), ("DK103b", (0, 1))]
    for one in (first, second):
        assert one.cause is not None
        assert str(one.cause.frame) == "placing.py:11 _move"
    assert "diagkit/capture" not in crashed.stderr
    assert crashed.stderr.count("diagkit: rank") == 2
    assert crashed.stderr.count("remedy:") == 1


def test_a_script_that_names_cuda_itself_is_told_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "job.py").write_text("import torch\ntorch.zeros(2, device='cuda')\n")
    result = subprocess.run(
        [sys.executable, "-m", "diagkit", "run", "--simulate", str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "diagkit: this script names cuda or nccl itself, and the simulated accelerator is 'npu' with 'hccl'. Take the"
    )


@pytest.mark.parametrize("moves", [False, True])
def test_ranks_that_the_script_starts_itself_are_recorded(moves: bool, tmp_path: pathlib.Path) -> None:
    words = [str(JOBS / "spawning.py"), str(tmp_path / "meet"), *(["move"] if moves else [])]
    done = subprocess.run(
        [sys.executable, "-m", "diagkit", "run", "--simulate", "--out", str(tmp_path / "runs"), *words],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    trace = open_trace(tmp_path / "runs")
    assert done.returncode == int(moves), done.stderr
    assert sorted(trace.ranks) == [0, 1]
    assert done.stderr.splitlines()[-1] == f"diagkit: trace: {trace.path} (simulated accelerator)"
    assert [finding.code for finding in diagnose(trace)] == ["DK101"] * moves
    assert ("DK101" in done.stderr) == moves
    if not moves:
        assert len(re.findall(r"rank \d has 4 tensors", done.stdout)) == 2
        assert trace.problems == []
