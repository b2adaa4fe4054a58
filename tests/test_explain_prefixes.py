"""`diagkit explain` on logs as loggers, containers and launchers prefix them, and on files that are no log."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from diagkit.cli import main
from diagkit.diagnosis.logs import explain_log

TEXT = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:0"'
LINES = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 5, in save',
    "    model.state_dict()",
    '  File "/site-packages/torch/nn/modules/module.py", line 2, in state_dict',
    f"RuntimeError: {TEXT}",
]


def _each(prefix: Callable[[int], str]) -> list[str]:
    return [prefix(i) + line for i, line in enumerate(LINES)]


# name -> the log's lines, and the rank that they tell
PREFIXED: dict[str, tuple[list[str], int | None]] = {
    "plain": (LINES, None),
    "Kubernetes": (_each(lambda i: f"2026-01-01T12:00:0{i}.{'123456789'[: 9 - i]}Z stderr F "), None),
    "Kubernetes around torchrun": (_each(lambda i: f"2026-01-01T12:00:0{i}.1Z stderr F [rank3]: "), 3),
    "Python logging, first line alone": (["2026-01-01 12:00:00,123 - ERROR - " + LINES[0], *LINES[1:]], None),
    "Python logging, each line": (_each(lambda i: f"2026-01-01 12:00:00,12{i} - job - ERROR - "), None),
    "hydra": (_each(lambda i: f"[2026-01-01 12:00:0{i},123][__main__][ERROR] - "), None),
    "glog": (_each(lambda i: f"[rank2]:E0101 12:00:00.12345{i} 4242 site-packages/x.py:12] "), 2),
    "glog behind a rank": (_each(lambda i: f"[rank0]:[rank0]:E0101 12:00:0{i}.1 77 x.py:3] [0/0] "), 0),
    "vLLM": (_each(lambda i: f"ERROR 01-01 12:00:0{i} file.py:12] "), None),
    "a worker's name": (_each(lambda i: "worker-0: "), None),
    "a node's name and a rank": (_each(lambda i: "node1: [rank5]: "), 5),
    "quoted": (_each(lambda i: "> "), None),
    "a tab": (_each(lambda i: "\t"), None),
    "four spaces": (_each(lambda i: "    "), None),
    "an exception group": (
        [
            "  + Exception Group Traceback (most recent call last):",
            '  |   File "/job/main.py", line 1, in <module>',
            "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
            "  +-+---------------- 1 ----------------",
            *(f"    | {line}" for line in LINES),
            "    +------------------------------------",
        ],
        None,
    ),
}
PREFIXED["Docker's JSON file"] = (
    [
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": f"2026-01-01T12:00:0{i}Z"})
        for i, line in enumerate(LINES)
    ],
    None,
)
PREFIXED["Docker's JSON file, both streams mixed, a long line in pieces"] = (
    [
        json.dumps({"log": text, "stream": stream})
        for i, line in enumerate(LINES)
        for stream, text in (
            ("stderr", f"[rank6]: {line}"[:30]),
            ("stdout", f"step {i}\n"),
            ("stderr", f"[rank6]: {line}"[30:] + "\n"),
        )
    ],
    6,
)
PREFIXED["Kubernetes, a long line in pieces"] = (
    [
        f"2026-01-01T12:00:0{i}.1Z stderr {tag} {piece}"
        for i, line in enumerate(LINES)
        for tag, piece in (("P", line[:20]), ("P", line[20:40]), ("F", line[40:]))
    ],
    None,
)
PREFIXED["an exception group in Kubernetes"] = (
    [f"2026-01-01T12:00:00.{i + 1}Z stderr F {line}" for i, line in enumerate(PREFIXED["an exception group"][0])],
    None,
)


@pytest.mark.parametrize("name", PREFIXED)
def test_a_traceback_is_found_behind_any_prefix(name: str) -> None:
    lines, rank = PREFIXED[name]
    found = explain_log(["step 1 loss 3.2\n", *(line + "\n" for line in lines), "bye\n"])
    assert found is not None
    assert (found.code, found.operation, found.where, found.rank) == ("DK101", "state_dict", "train.py:5 save", rank)
    assert found.error == f"RuntimeError: {TEXT}" or found.error == f"RuntimeError: {TEXT} bye"


def test_a_message_ends_where_a_logger_writes_the_next() -> None:
    def log(second: int, text: str) -> str:
        return f"2026-01-01T12:00:0{second}.5Z stderr F {text}"

    error = [log(1, LINES[0]), log(1, LINES[1]), log(2, "RuntimeError: Error in loading:")]
    found = explain_log(
        [*error, log(2, "with the same time"), log(3, "\tMissing key"), log(3, "step 4"), log(3, "  x")]
    )
    assert found is not None and found.error == "RuntimeError: Error in loading: with the same time Missing key"


def test_workers_that_share_a_learnt_prefix_are_told_apart() -> None:
    other = [LINES[0], '  File "/job/other.py", line 9, in load', "    x", "    y", "ValueError: something else"]
    mixed = [
        line for pair in zip(other, LINES, strict=True) for line in ("worker-1: " + pair[0], "worker-12: " + pair[1])
    ]
    found = explain_log(mixed)
    assert found is not None and (found.code, found.where) == ("DK101", "train.py:5 save")


def test_an_ordinary_traceback_after_an_indented_one_is_read_as_it_stands() -> None:
    first = ["    Traceback (most recent call last):", '      File "/a.py", line 1, in f', "    ValueError: a"]
    found = explain_log([*first, "", *LINES])
    assert found is not None and (found.code, found.where) == ("DK101", "train.py:5 save")


def test_pieces_that_never_end_are_handed_on() -> None:
    endless = [json.dumps({"log": "x" * 1000, "stream": "stdout"}) for _ in range(1000)]
    assert explain_log([*endless, *LINES]) is not None
    assert explain_log(['{"log": 1}', '{"log": "x"', "[" * 100_000, '{"a":' * 100_000, *LINES]) is not None


# ---- files that are no log


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress("\n".join(LINES).encode()), ("found gzip", "gunzip -c")),
        ("\n".join(LINES).encode("utf-16"), ("found UTF-16", "iconv -f UTF-16")),
        ("\n".join(LINES).encode("utf-16-le"), ("found UTF-16", "iconv -f UTF-16")),
        (bytes(range(256)) * 40, ("found binary data", "Name a text file")),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(
    content: bytes, says: tuple[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(content)
    assert main(["explain", str(path)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and all(word in error for word in says)


@pytest.mark.parametrize(
    "content",
    [b"\0" * 5000 + "\n".join(LINES).encode(), ("é" * 50 + "\n").encode("latin-1") + "\n".join(LINES).encode(),
     "\r".join(LINES).encode(), "\r\n".join(LINES).encode(), b"\xef\xbb\xbf" + "\n".join(LINES).encode()],
)  # fmt: skip
def test_odd_text_is_read_all_the_same(
    content: bytes, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(content)
    assert main(["explain", str(path)]) == 1
    assert "train.py:5 save" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "x" * 5000, "no\0where", ""])
def test_what_is_no_file_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", path]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot read the log" in error and len(error) < 500


def test_a_pipe_is_read(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.write(writing, "\n".join(LINES).encode())
    os.close(writing)
    assert main(["explain", f"/dev/fd/{reading}"]) == 1
    os.close(reading)
    assert "DK101" in capsys.readouterr().out


def test_memory_follows_what_is_told_not_the_log() -> None:
    frames = [f'  File "/job/{"d" * 500}{i}.py", line {i}, in f' for i in range(400)]

    def log() -> Iterator[str]:
        for _ in range(60):
            yield LINES[0]
            yield from (str(frame) for frame in frames)
            yield "ValueError: " + "x" * 10_000

    tracemalloc.start()
    found = explain_log(log())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None and found.code is None and found.error.startswith("ValueError: xxx")
    assert peak < 4 << 20, "60 tracebacks of 200 KB each: one of them is held at a time"
