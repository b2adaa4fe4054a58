"""What is private in a trace is in no output of a redacted one, and what a reader needs still is."""

from __future__ import annotations

import itertools
import json
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import Rank, decoder_names, engine_trace, on

from diagkit.cli import main
from diagkit.diagnosis import diagnose
from diagkit.diagnosis.signatures import SIGNATURES, said
from diagkit.trace import open_trace, read_rank
from diagkit.trace.merged import Trace
from diagkit.trace.redact import Redactor, redacted
from diagkit.trace.schema import CALL, ENTER, EXIT, FAILURE, PARAMETER, Cause, Failure, Frame, Header, Row
from diagkit.trace.writer import MemorySink, TraceWriter

HOME = "/".join(["", "home", "alice"])  # spelled in parts: no tracked file names a path of one machine
HOSTS = ("gpu-17.east.acme.corp", "gpu-18.east.acme.corp")
PRIVATE = (
    *HOSTS, "gpu-17", "gpu-18", "acme", "alice", "bob.smith", "10.11.12.13", "fe80::1ff:fe23:4567:890a", "hf_",
    "s3cr3t", "moonshot", "wandb.ai", "00:1b:44:11:3a:b7", "/home", "/mnt", "Users", "checkpoints",
    "1a1",
)  # fmt: skip
NAMES = ("moe.0.secret_router.weight", "moe.1.secret_router.weight", "tower.bias")
SPLIT_TEXT = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "npu:0".'


def write(folder: pathlib.Path, rank: int) -> None:
    """A rank with something private in every place that can hold a text."""
    header = Header(
        run="moonshot-29500",
        rank=rank,
        world_size=2,
        host=HOSTS[rank],
        device="npu",
        device_uuid=f"GPU-5e{rank}1a1",
        visible_devices=f"0,GPU-5e{rank}1a1",
        torch="2.13.0",
        simulated=True,
        argv=(f"{HOME}/moonshot/train.py", "--data=/mnt/moonshot/a b", "--hf-token", "s3cr3t-1", "out/alice/x"),
        job={
            "engine": "FSDPEngine",
            "user": "bob.smith",
            "master_host": "10.11.12.13",
            "env": {"WANDB": "https://wandb.ai/acme/moonshot", "API_KEY": "s3cr3t-2", "dirs": ["/mnt/moonshot"]},
        },
    )
    writer = TraceWriter.create(folder, header)
    writer.table([Row(i, PARAMETER, "model", name) for i, name in enumerate(NAMES)])
    every = Rank(NAMES, rank, 2)  # only for its facts
    healthy, split = (writer.fact_id(on(device, True, "cpu")) for device in ("cpu", f"npu:{rank}"))
    changes = every.parameters(on("cpu", True))
    move = Cause(
        "Module._apply",
        ("save_to_disk", "Module.to"),
        Frame(f"{HOME}/moonshot/engine.py", 41, "save", 'model.to("npu")  # alice, load("/mnt/moonshot/x y.pt")'),
        (Frame("C:\\Users\\bob.smith\\run.py", 3, "<module>", ""),),
        "moe.0.secret_router",
        "from s3://moonshot/checkpoints",
    )
    writer.moment(ENTER, "init: enter", 1, [], key=True, begins={"name": "init", "label": "on gpu-17"})
    writer.moment(CALL, "born", 1, [change(c, healthy) for c in changes])
    writer.moment(EXIT, "init: exit", 1, [])
    writer.moment(ENTER, "save: enter", 2, [], begins={"name": "save"})
    writer.moment(CALL, "Module._apply", 2, [change(c, split) for c in changes], cause=move)
    message = (
        f"{SPLIT_TEXT} At /mnt/moonshot/checkpoints/step 1, on gpu-18:29500 (10.11.12.13:4567, "
        "fe80::1ff:fe23:4567:890a, 00:1b:44:11:3a:b7), login alice@gpu-17, password: s3cr3t-3, "
        "hf_abcdefghijklmnopqrst, see moe.0.secret_router.weight in checkpoints/alice/moe.pt"
    )
    writer.moment(FAILURE, "Module.state_dict", 2, [], failure=Failure("RuntimeError", message, "Module.state_dict"))
    writer.trouble("writer", "cannot open /mnt/moonshot/full on gpu-17")
    writer.standstill(3.0, f"{HOME}/moonshot/engine.py:41")


def change(old, facts):  # type: ignore[no-untyped-def]
    return type(old)(old.start, old.count, facts)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    place = tmp_path / "alice-moonshot"
    for rank in range(2):
        write(place, rank)
    return place


def leaks(text: str, private: tuple[str, ...] = PRIVATE) -> list[str]:
    found = [word for word in private if word.lower() in text.lower()]
    return found


def everything(trace: Trace) -> str:
    """What any part of diagkit could show of a trace, and more: every attribute of every record."""
    parts = [repr(trace), str(trace), trace._repr_html_(), str(trace.path), trace.frame().to_csv(), *trace.problems]
    for rank in trace:
        parts += [repr(rank), repr(rank.header), repr(rank.moments), repr(rank.phases), repr(rank.rows)]
        parts += [repr(rank.facts), repr(rank.causes), *rank.troubles, *rank.problems, str(rank.standstill)]
        parts += [str(rank.path), str(rank.ended)]
    findings = diagnose(trace)
    return "\n".join([*parts, repr(findings), json.dumps(findings.to_json()), findings._repr_html_()])


def test_the_trace_itself_leaks_what_the_test_looks_for(folder: pathlib.Path) -> None:
    assert set(leaks(everything(open_trace(folder)))) == set(PRIVATE)


def test_nothing_private_is_left_anywhere_in_a_redacted_trace(folder: pathlib.Path) -> None:
    text = everything(redacted(open_trace(folder)))
    assert leaks(text) == []
    assert "secret_router" in text  # parameter names are kept unless asked for


def test_parameter_names_go_on_demand_and_layers_still_fold(folder: pathlib.Path) -> None:
    trace = redacted(open_trace(folder), names=True)
    assert leaks(everything(trace), (*PRIVATE, "secret_router", "moe", "tower")) == []
    assert [row.name for row in trace[0].rows] == ["n1.0.n2.weight", "n1.1.n2.weight", "n3.bias"]
    [finding] = diagnose(trace)
    assert finding.where == ("n1.{0,1}.n2.weight ×2", "n3.bias")


def test_a_short_host_is_taken_out_where_it_is_certain() -> None:
    """Two letters may be anything in a text, but not in the field for the host."""
    sink = MemorySink()
    TraceWriter(sink, Header(run="r", host="vm")).close()
    trace = redacted(Trace({0: read_rank(sink.lines)}))
    assert (trace.header.host, trace.header.run) == ("HOST1", "RUN1")


def test_one_original_is_one_word_on_every_rank_and_in_every_text(folder: pathlib.Path) -> None:
    trace = redacted(open_trace(folder))
    hosts = [rank.header.host for rank in trace]
    assert len(set(hosts)) == 2 and all(re.fullmatch(r"HOST\d", host) for host in hosts)
    folders = {
        rank.moments[4].cause.frame.file for rank in trace if rank.moments[4].cause and rank.moments[4].cause.frame
    }
    assert len(folders) == 1 and folders == {trace[0].header.argv[0].replace("train", "engine")}
    first, second = (rank.failures[0].failure for rank in trace)
    assert first == second
    assert f"{hosts[1]}:29500" in str(first)  # a short name is the same host


@pytest.mark.parametrize("names", [False, True])
def test_a_redacted_trace_has_the_findings_of_the_original(folder: pathlib.Path, names: bool) -> None:
    trace = open_trace(folder)

    def told(its: Trace) -> list[object]:
        return [
            (f.code, f.severity, f.ranks, f.residency, f.moment, len(f.names), f.consequences) for f in diagnose(its)
        ]

    assert told(redacted(trace, names)) == told(trace) != []
    plain = engine_trace(ranks=2)
    assert told(redacted(plain, names)) == told(plain) != []


def test_what_a_diagnosis_needs_stays(folder: pathlib.Path) -> None:
    trace = redacted(open_trace(folder))
    header = trace.header
    assert (header.torch, header.device, header.world_size, header.simulated) == ("2.13.0", "npu", 2, True)
    assert header.job["engine"] == "FSDPEngine"
    cause = trace[0].moments[4].cause
    assert cause is not None and cause.frame is not None
    assert re.fullmatch(r"PATH\d+/engine\.py", cause.frame.file)
    assert cause.frame.code.startswith('model.to("npu")')
    assert said(trace[0].failures[0].failure.message) == {"set_storage"}  # type: ignore[union-attr]


def test_the_original_is_left_as_it_was(folder: pathlib.Path) -> None:
    trace = open_trace(folder)
    before = everything(trace)
    redacted(trace, names=True)
    assert everything(trace) == before


TEXTS = [
    (f"{HOME}/train.py", "PATH1/train.py"),
    ('loaded "/data/my things/x.pt" well', 'loaded "PATH1" well'),
    ("C:\\Users\\bob\\x.txt", "PATH1"),
    ("\\\\server\\share\\file", "PATH1"),
    ("~/runs and ../up/here", "PATH1 and PATH2"),
    ("PATH=/usr/bin:/opt/bin", "PATH=PATH1:PATH2"),
    ("runs/a/x.pt is missing", "PATH1 is missing"),
    ("see https://intra.example.org/x?key=1.", "see ADDRESS1"),
    ("10.1.2.3:29500 and ::1 and fe80::1:2", "ADDRESS1:29500 and ADDRESS2 and ADDRESS3"),
    ("node-7:29500", "ADDRESS1"),
    ("mail me@lab.example.cn", "mail ADDRESS1"),
    ("build.lab.internal", "ADDRESS1"),
    ("--api-key=abcdefg", "--api-key=SECRET1"),
    ("password: hunter22", "password: SECRET1"),
    ("password='correct horse battery'", "password='SECRET1'"),
    ("Authorization: Bearer eyJhbGciOiJI.QWxpY2U.c2ln ;", "Authorization: Bearer SECRET1 ;"),
    ("'Authorization': 'Basic dXNlcjpwYXNz'", "'Authorization': 'Basic SECRET1'"),
    ("sent bearer abc123", "sent bearer SECRET1"),
    ("got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N.", "got SECRET1."),
    ("WANDB_KEY=abcdefgh SSH_PASS=hunter2", "WANDB_KEY=SECRET1 SSH_PASS=SECRET2"),
    ("{'private_key': 'a b c'}", "{'private_key': 'SECRET1'}"),
    ("MASTER_ADDR=node17", "MASTER_ADDR=ADDRESS1"),
    ("host=gpu-17.acme.io port 22", "host=ADDRESS1 port 22"),
    ("server: gpu17, endpoint hostname='lab'", "server: ADDRESS1, endpoint hostname='ADDRESS2'"),
    ("USER=alice, owner='bob'", "USER=USER1, owner='USER2'"),
    ("No such file: data\\alice\\ckpt.pt", "No such file: PATH1"),
    ("data\\secret.pt and a\\b\\c", "PATH1 and PATH2"),
    ("wrote /mnt/alice smith/secret project/ckpt.pt now", "wrote PATH1 now"),
    ("C:\\Users\\alice smith\\x.pt is gone", "PATH1 is gone"),
    ("gpu-17.acme.net, server.acme.io and acme.ai", "ADDRESS1, ADDRESS2 and ADDRESS3"),
    ("gpu-17.rack.acme answers", "ADDRESS1 answers"),
    ("code.acme.dev:443", "ADDRESS1:443"),
]
KEPT = [
    "npu:0/cpu pinned", "forward/backward", "2.13.0+cpu", "c10::Error", "engine.py:1234", "12:34:56", "x = y / 2",
    "max_tokens=4096", "self.net", "model.net(x)", "x = net.io.read()", "torch.npu.FloatTensor",
    "qwen-2.5.7b.safetensors",
    "torch-2.13.0+cpu", "node=0", "device: host=cpu", "a key: layers.0", "key=lambda x: x", 'print("a\\nb")',
    "the bearer of 3", "host memory: 3 GB", "logger.info",
    "model.layers.0.mlp.up_proj.weight", "cpu:gloo,npu:hccl", "Module._apply", 'device "npu:0".',
    *(pattern.pattern for pattern in SIGNATURES.values()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_what_is_private_is_known_by_its_form(text: str, expected: str) -> None:
    assert Redactor().text(text) == expected


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_is_kept(text: str) -> None:
    assert Redactor().text(text) == text


def test_a_part_of_the_model_that_is_named_like_a_host_is_kept() -> None:
    redactor = Redactor()
    redactor.traces(engine_trace(["critic.net.weight", "tower-1.block.io.weight"]))
    texts = ["critic.net is frozen", "in tower-1.block.io", "see model.critic.net"]
    assert [redactor.text(text) for text in texts] == texts
    assert redactor.text("critic.acme.net") == "ADDRESS1"


def test_a_host_that_one_message_names_is_taken_out_of_all() -> None:
    sink = MemorySink()
    writer = TraceWriter(sink, Header(run="run-1"))
    for message in ("MASTER_ADDR=node17 does not answer", "lost node17 after 3 s"):
        writer.moment(FAILURE, "init", 0, [], failure=Failure("RuntimeError", message, "init"))
    trace = redacted(Trace({0: read_rank(sink.lines)}))
    told = [moment.failure.message for moment in trace[0].failures if moment.failure]
    assert told == ["MASTER_ADDR=HOST1 does not answer", "lost HOST1 after 3 s"]


@given(st.text(max_size=200))
def test_no_text_breaks_it_and_a_second_time_changes_no_path(text: str) -> None:
    redactor = Redactor()
    assert isinstance(redactor.text(text), str)
    assert HOME not in redactor.text(f"{text} {HOME}/{text}")


def test_a_parameter_named_like_a_word_of_torch_does_not_hide_what_an_exception_says() -> None:
    trace = engine_trace(["storage.tensor.weight", "device.different.weight"])
    assert diagnose(redacted(trace, names=True)).codes == diagnose(trace).codes


# ---- the commands


COMMANDS = [["diagnose"], ["diagnose", "--json"]]


@pytest.mark.parametrize(("command", "option"), [*itertools.product(COMMANDS, ["--redact", "--redact-names"])], ids=str)
def test_no_command_tells_what_is_private(
    folder: pathlib.Path, command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(folder)]) == 1
    assert leaks(capsys.readouterr().out)
    assert main([*command, option, str(folder)]) == 1
    out = capsys.readouterr()
    private = (*PRIVATE, "secret_router") if option == "--redact-names" else PRIVATE
    assert leaks(out.out + out.err, private) == []


def test_names_of_a_decoder_still_make_one_pattern_each() -> None:
    trace = redacted(engine_trace(decoder_names(4)), names=True)
    original = engine_trace(decoder_names(4))
    assert len(diagnose(trace)[0].where) <= len(diagnose(original)[0].where) == 6


@pytest.mark.parametrize("option", ["--redact", "--redact-names"])
def test_exported_tables_and_comparisons_tell_nothing_private(
    folder: pathlib.Path, tmp_path: pathlib.Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private = (*PRIVATE, "secret_router") if option == "--redact-names" else PRIVATE
    other = tmp_path / "other"
    other.mkdir()
    (other / "rank-00000.jsonl").write_bytes((folder / "rank-00001.jsonl").read_bytes().replace(b'"save"', b'"load"'))
    out = tmp_path / "tables"
    assert main(["export", str(folder), "--to", "csv", "-o", str(out), option]) == 0
    assert leaks("".join(path.read_text() for path in out.iterdir()), private) == []
    capsys.readouterr()
    for form in ([], ["--json"]):
        assert main(["compare", str(folder), str(other), option, *form]) == 1
        assert leaks(capsys.readouterr().out, private) == []


@pytest.mark.parametrize("form", ["html", "md", "json"])
@pytest.mark.parametrize("option", ["--redact", "--redact-names"])
def test_a_report_tells_nothing_private(
    folder: pathlib.Path, tmp_path: pathlib.Path, option: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    private = (*PRIVATE, "secret_router") if option == "--redact-names" else PRIVATE
    plain, hidden = tmp_path / f"plain.{form}", tmp_path / f"hidden.{form}"
    assert main(["report", str(folder), "-o", str(plain)]) in (0, 1)
    assert set(leaks(plain.read_text())) >= {"alice", "s3cr3t", "gpu-17"}
    assert main(["report", str(folder), "-o", str(hidden), option]) in (0, 1)
    assert leaks(hidden.read_text().replace(str(tmp_path), ""), private) == []
