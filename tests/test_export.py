"""A trace leaves as tables that other tools read, and that no spreadsheet executes."""

from __future__ import annotations

import csv
import pathlib
import subprocess
import sys

import pytest
from traces import Rank, engine_trace, on

from diagkit.cli import main
from diagkit.diagnosis import diagnose
from diagkit.errors import MissingDependency, UsageError
from diagkit.trace import Trace, open_trace
from diagkit.trace.export import TABLES, export
from diagkit.trace.schema import CALL, MARK, Cause, Failure

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'diagkit[parquet]'")


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(folder: pathlib.Path, trace: Trace) -> pathlib.Path:
    folder.mkdir()
    for rank in trace:
        told = Rank(["a.0.w", "a.1.w"], rank.rank, len(trace), buffers=())
        told.writer.moment(MARK, "start", 0, told.parameters(on("cpu", True)), key=True)
        told.writer.moment(CALL, "to", 0, told.parameters(on(f"npu:{rank.rank}", True, "cpu")))
        told.writer.close()
        (folder / f"rank-{rank.rank:05d}.jsonl").write_bytes(b"".join(told.sink.lines))
    return folder


def test_parquet_and_csv_hold_the_same_lines(tmp_path: pathlib.Path) -> None:
    trace = engine_trace(ranks=2)
    tables = [parquet.read_table(path) for path in export(trace, tmp_path / "p", "parquet")]
    texts = [read_csv(path) for path in export(trace, tmp_path / "c", "csv")]
    for table, text, wanted in zip(tables, texts, TABLES, strict=True):
        assert table.column_names == list(text[0]) == list(wanted.columns)
        assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in table.to_pylist()] == text
    residencies, moments, ranks = tables
    assert residencies.num_rows == len(trace.frame()) > 0
    assert moments.num_rows == sum(len(rank.moments) for rank in trace)
    assert ranks.column("rank").to_pylist() == [0, 1]


def test_the_table_of_residencies_is_the_frame(tmp_path: pathlib.Path) -> None:
    trace = engine_trace()
    path = export(trace, tmp_path, "parquet")[0]
    expected, found = (table.astype(object) for table in (trace.frame(), parquet.read_table(path).to_pandas()))
    assert found.where(found.notna(), None).equals(expected.where(expected.notna(), None))


def test_the_failure_and_its_line_are_in_the_moments(tmp_path: pathlib.Path) -> None:
    rows = parquet.read_table(export(engine_trace(), tmp_path, "parquet")[1]).to_pylist()
    [failed] = [row for row in rows if row["failure"]]
    assert (failed["operation"], failed["line"], failed["phase_name"]) == ("Module.state_dict", 44, "save")
    assert failed["message"].startswith("Attempted to set the storage")


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "=cmd|'/c calc'!A1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_text_is_a_formula(tmp_path: pathlib.Path, text: str) -> None:
    """Wherever a trace's own words can stand: names, labels, causes, messages."""
    told = Rank([text, "a.w"], buffers=())
    culprit = Cause(text, (text,), None, (), text, text)
    changes = told.parameters(on("cpu"))
    told.writer.moment(MARK, text, 0, changes, key=True, cause=culprit, failure=Failure(text, text, text))
    trace = Trace({0: told.read()})
    cells = [cell for path in export(trace, tmp_path, "csv") for row in read_csv(path) for cell in row.values()]
    dangerous = [cell for cell in cells if cell.strip(" ")[:1] in set("=+-@\t\r\n＝＋－＠")]
    assert not dangerous
    assert sum(text.strip() in cell for cell in cells) >= 5  # it is all there, behind an apostrophe


def test_numbers_stay_numbers(tmp_path: pathlib.Path) -> None:
    row = read_csv(export(engine_trace(), tmp_path, "csv")[0])[0]
    assert (row["rank"], row["generation"], row["pinned"]) == ("0", "0", "False")


def test_what_is_there_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    (tmp_path / "moments.csv").write_text("mine")
    with pytest.raises(UsageError, match="there is such a file already"):
        export(engine_trace(), tmp_path, "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["moments.csv"]
    assert (tmp_path / "moments.csv").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot export: found .*Name a folder that can be written"):
        export(engine_trace(), tmp_path / "file" / "x", "csv")


def test_parquet_without_pyarrow_is_one_clear_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'diagkit\[parquet\]', or export with --to csv"):
        export(engine_trace(), tmp_path / "out", "parquet")
    assert not (tmp_path / "out").exists()


def test_the_command_names_its_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "trace", engine_trace(ranks=2))
    assert main(["export", str(folder), "--to", "parquet", "-o", str(tmp_path / "out")]) == 0
    names = [pathlib.Path(line).name for line in capsys.readouterr().out.split("\n") if line]
    assert names == ["residencies.parquet", "moments.parquet", "ranks.parquet"]
    assert main(["export", str(folder), "--to", "parquet", "-o", str(tmp_path / "out")]) == 2
    assert "already" in capsys.readouterr().err


def test_csv_works_without_anything_that_is_installed(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path / "trace", engine_trace(ranks=1))
    root = pathlib.Path(__file__).parent.parent
    command = [sys.executable, "-S", "-m", "diagkit", "export", str(folder), "--to", "csv", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_csv(tmp_path / "out" / "residencies.csv")) == 4


def states(trace: Trace) -> list[object]:
    return [
        (moment.label, moment.time, [rank.facts[n] for n in rank.state(moment).facts], rank.state(moment).generations)
        for rank in trace
        for moment in rank.moments
    ]


@pytest.mark.parametrize("options", [{}, {"guarded": True}, {"heals": True}], ids=str)
def test_a_trace_written_once_more_says_the_same(tmp_path: pathlib.Path, options: dict[str, bool]) -> None:
    trace = engine_trace(ranks=2, **options)  # type: ignore[arg-type]
    again = open_trace(export(trace, tmp_path, "jsonl")[0].parent)
    assert states(again) == states(trace)
    for one, other in zip(again, trace, strict=True):
        assert (one.header, one.rows, one.phases, one.problems) == (other.header, other.rows, other.phases, [])
        assert [(m.cause, m.failure) for m in one.moments] == [(m.cause, m.failure) for m in other.moments]
    assert diagnose(again).to_json() == diagnose(trace).to_json()


def test_a_trace_that_was_cut_off_stays_so(tmp_path: pathlib.Path) -> None:
    whole = engine_trace()[0]
    whole.ended = None
    again = open_trace(export(Trace({0: whole}), tmp_path, "jsonl")[0])
    assert again[0].ended is None and "cut off" in again.problems[0]


def test_a_redacted_trace_can_be_handed_on(tmp_path: pathlib.Path) -> None:
    export(engine_trace().redacted(names=True), tmp_path, "jsonl")
    text = (tmp_path / "rank-00000.jsonl").read_text()
    assert "embed_tokens" not in text and "/site/verl" not in text
    assert diagnose(open_trace(tmp_path)).codes == diagnose(engine_trace()).codes
