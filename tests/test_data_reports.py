"""Every recorded trace of ``data/`` tells its story in each form and in each language."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diagkit.language import language
from diagkit.trace import open_trace

DATA = Path(__file__).resolve().parent.parent / "data"
TRACES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir() and any(folder.glob("rank-*.jsonl")))
HAN = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", TRACES)
def test_its_report_names_code_line_and_remedy_in_each_form(name: str, lang: str, tmp_path: Path) -> None:
    with language(lang):
        trace = open_trace(DATA / name)
        findings = trace.findings()
    texts = {}
    for suffix in ("html", "md", "json"):
        file = tmp_path / f"report.{suffix}"
        trace.report(file, lang=lang)
        texts[suffix] = file.read_text(encoding="utf-8")
        assert (len(HAN.findall(texts[suffix])) > 100) == (lang == "zh"), suffix
    told = json.loads(texts["json"])
    assert [finding["code"] for finding in told["diagnosis"]["findings"]] == [finding.code for finding in findings]
    for finding in findings:
        for suffix in ("html", "md"):
            assert finding.code in texts[suffix]
        if finding.cause is not None and finding.cause.frame is not None:
            where = f"{finding.cause.frame.file.rpartition('/')[2]}:{finding.cause.frame.line}"
            assert where in texts["html"] and where in texts["md"]
