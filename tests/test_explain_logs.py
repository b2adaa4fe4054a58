"""`diagkit explain JOB.LOG`: the first failure in real logs, torchrun's and Ray's prefixes included."""

from __future__ import annotations

import io
import json
import pathlib

import pytest

from diagkit.cli import main
from diagkit.diagnosis.logs import explain_log

LOGS = pathlib.Path(__file__).resolve().parent / "logs"

# log -> first candidate, operation, the user's line, the rank that failed first
REAL = {
    "torchrun-save": ("DK101", "state_dict", "job.py:29 save_checkpoint", 0),
    "torchrun-forward": ("DK101", "forward", "bench.py:71 loss", 1),
    "torchrun-backward": ("DK101", "backward", "bench.py:77 train", 0),
    "torchrun-clip": ("DK402", "clip_grad_norm_", "job.py:50 run", 0),
    "torchrun-tee-step": ("DK301", "optimizer.step", "job.py:54 run", 1),
    "torchrun-retry": ("DK101", "forward", "bench.py:71 loss", 0),
    "plain-buffers": ("DK501", "forward", "models.py:55 forward", 0),
    "plain-meta": ("DK104", "forward", "bench.py:71 loss", 0),
    "plain-retry-only": ("DK601", "forward", "bench.py:71 loss", 0),
    "plain-swap": ("DK101", ".to(device)", "job.py:24 load_model_to_device", 0),
    "ray-save": ("DK101", "state_dict", "job.py:29 save_checkpoint", 1),
    "ray-clip": ("DK402", "clip_grad_norm_", "job.py:50 run", 1),
}


@pytest.mark.parametrize("name", REAL)
def test_the_first_candidate_of_a_real_log_is_right(name: str) -> None:
    code, operation, where, rank = REAL[name]
    with (LOGS / f"{name}.log").open(encoding="utf-8") as log:
        found = explain_log(log)
    assert found is not None and not found.certain
    assert (found.code, found.operation, found.where, found.rank) == (code, operation, where, rank)
    assert any("diagkit run" in step for step in found.next), "it says what to record to be sure"


def test_every_log_is_asked_about() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*REAL, "torchrun-shape"}


def test_an_ordinary_failure_has_no_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(LOGS / "torchrun-shape.log")]) == 0
    assert "not an FSDP2 residency problem" in capsys.readouterr().out


def test_the_command_reads_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LOGS / "ray-save.log"
    assert main(["explain", str(path), "--json"]) == 1
    from_file = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
    assert main(["explain", "-", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == from_file
    assert [c["code"] for c in from_file["candidates"]] == ["DK101", "DK102"]


def test_a_log_without_exceptions_and_a_missing_one(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    calm = tmp_path / "calm.log"
    calm.write_text("step 1 loss 3.2\nstep 2 loss 3.1\n")
    assert main(["explain", str(calm)]) == 0
    assert "no exception" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "nowhere.log")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


SLURM = """\
0: Traceback (most recent call last):
1: Traceback (most recent call last):
0:   File "/job/train.py", line 7, in save
1:   File "/job/train.py", line 7, in save
1:     model.state_dict()
0: ValueError: something else
1: RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:1".
"""


def test_lines_of_many_ranks_are_not_mixed_up() -> None:
    found = explain_log(SLURM.splitlines(keepends=True))
    assert found is not None
    assert (found.code, found.rank, found.where) == ("DK101", 1, "train.py:7 save")


TRACEBACK = """\
Traceback (most recent call last):
  File "/job/train.py", line 31, in save
    engine.save_checkpoint(path)
{error}
"""
RAISED = ["diagkit.errors.MoveBlocked: a move", "package.module.Unusable: no", "package.Stopped", "OSError: disk full"]


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_ends_a_traceback_is_an_exception(raised: str) -> None:
    found = explain_log(TRACEBACK.format(error=raised).splitlines())
    assert found is not None
    assert found.error.split(":")[0] == raised.split(":")[0].rpartition(".")[2]
    assert found.where == "train.py:31 save"


def test_what_a_guard_stopped_is_told_with_the_line_to_delete() -> None:
    text = "diagkit.errors.MoveBlocked: a move splits its parameters (DK101): found Module.to (at engine.py:12 save)."
    found = explain_log(TRACEBACK.format(error=text).splitlines())
    assert found is not None
    assert (found.code, found.certain, found.candidates) == ("DK101", True, ())
    assert repr(found).endswith("dk.guard stopped DK101 before it happened: delete the move at engine.py:12 save.")


LOGGED = [
    "E1129 18:30:00.000000 123 torch/distributed/elastic/multiprocessing/api.py:984] failed",
    "INFO:root:bye",
    "INFO bye",
    "[WARNING] slow",
    "2026-11-29 18:30:00,000 bye",
    "18:30:00 bye",
    "diagkit: recorded to runs/a",
]


@pytest.mark.parametrize("line", LOGGED)
def test_what_a_logger_says_next_is_not_part_of_the_message(line: str) -> None:
    log = TRACEBACK.format(error="ValueError: first\n  second, indented\nthird") + f"{line}\nand its own next line\n"
    found = explain_log(log.splitlines())
    assert found is not None
    assert found.error == "ValueError: first second, indented third"


def test_hostile_lines_neither_raise_nor_hang() -> None:
    nasty = [
        "Traceback (most recent call last):\n" * 3,
        '  File "' + "x" * 100_000 + '", line 99999999999, in f\n',
        "(" * 50_000 + "\n",
        "[rank99999999]: " * 1000 + "\n",
        "RuntimeError: " + "A" * 200_000 + "\n",
        "\x1b[31m\x00\u202eError\n",
        "a.b.c." * 5_000 + "Error: x\n",
    ]
    found = explain_log(nasty * 3)
    assert found is None or found.code is None


def test_many_lines_that_begin_over_and_over_are_read_within_a_tests_time() -> None:
    """Searched in the time of their length squared, they would take longer than a test may."""
    assert explain_log(["RayTaskError" * 1_600 + "\n"] * 2_500) is None
