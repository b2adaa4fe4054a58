"""Everything that is told to people is found, has its Chinese and keeps its values; compiled is what is written."""

from __future__ import annotations

import gettext
import html
import importlib.util
import io
import pathlib
import re
import threading
from types import ModuleType

import pytest
from traces import engine_trace

from diagkit.cli import main
from diagkit.diagnosis import all_rules
from diagkit.errors import UsageError
from diagkit.language import LANGUAGES, chosen, language, tr, trn
from diagkit.views.report import render

pytest.importorskip("babel")

ROOT = pathlib.Path(__file__).resolve().parent.parent
OTHERS = LANGUAGES[1:]
_PLACE = re.compile(r"\{[a-z_]*\}")


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("translations", ROOT / ".ci" / "translations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = tool()


def wanted(rules: bool) -> dict[object, str]:
    """Every text, or those of the hazards alone, with the file it stands in."""
    hazards = {text for text, _ in TOOL.hazards()}
    return {m.id: m.locations[0][0] for m in TOOL.wanted() if m.id and (m.id in hazards) == rules}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("rules", [False, True], ids=["sentences", "hazards"])
def test_everything_told_to_people_is_translated(name: str, rules: bool) -> None:
    catalogue = TOOL.read(name)
    told = {message.id for message in catalogue if message.id and all(TOOL.texts(message.string))}
    missing = [(where, text) for text, where in wanted(rules).items() if text not in told]
    assert not missing, "run make translations, then write the missing texts"


@pytest.mark.parametrize("name", OTHERS)
def test_no_catalogue_holds_what_nobody_says_any_more(name: str) -> None:
    known = wanted(False) | wanted(True)
    assert [message.id for message in TOOL.read(name) if message.id and message.id not in known] == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_has_the_same_places_for_values(name: str) -> None:
    for message in TOOL.read(name):
        if not message.id or not all(TOOL.texts(message.string)):
            continue
        places = sorted(_PLACE.findall(TOOL.texts(message.id)[-1]))
        for text in TOOL.texts(message.string):
            assert sorted(_PLACE.findall(text)) == places, text


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_keeps_the_code_that_stands_in_backticks(name: str) -> None:
    for message in TOOL.read(name):
        if isinstance(message.id, str) and message.id and message.string:
            assert sorted(re.findall("`[^`]+`", message.string)) == sorted(re.findall("`[^`]+`", message.id)), (
                message.id
            )


@pytest.mark.parametrize("name", OTHERS)
def test_the_compiled_catalogue_is_the_written_one(name: str) -> None:
    written = gettext.GNUTranslations(io.BytesIO(TOOL.compiled(TOOL.read(name))))
    with (TOOL.CATALOGUES / f"{name}.mo").open("rb") as file:
        shipped = gettext.GNUTranslations(file)
    assert shipped._catalog == written._catalog, "run make translations"  # type: ignore[attr-defined]


def test_a_language_holds_inside_its_block_and_in_its_thread_alone() -> None:
    heard = []
    with language("zh"):
        assert (chosen(), tr("remedy"), trn("{count} rank", "{count} ranks", 1200)) == (
            "zh",
            "处理办法",
            "1,200 个 rank",
        )
        thread = threading.Thread(target=lambda: heard.append(tr("remedy")))
        thread.start()
        thread.join()
    assert (chosen(), heard, tr("remedy")) == ("en", ["remedy"], "remedy")


def test_what_has_no_translation_stays_english_and_values_are_never_read_as_texts() -> None:
    with language("zh"):
        assert tr("nobody ever said {this}", this="{that}") == "nobody ever said {that}"
        assert tr("") == ""


def test_a_language_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UsageError, match="unknown language: found tlh, expected one of en, zh"), language("tlh"):
        pass


def test_a_rule_speaks_the_language_that_is_chosen_when_it_is_read() -> None:
    (rule,) = [rule for rule in all_rules() if rule.code == "DK101"]
    english = rule.title
    with language("zh"):
        assert rule.title == tr(rule.english_title)
        assert rule.text["Call"] == rule.english["Call"]
        assert rule.references
    assert rule.title == english == rule.english_title


# What stands in an English report and is no name, no code and nobody's message.
_ENGLISH = re.compile(r"\b(the|was|were|and|which|that|with|its|their|from|into|of)\b")


@pytest.mark.parametrize("form", ["md", "html"])
def test_a_chinese_report_has_no_english_sentence_of_ours(form: str) -> None:
    trace = engine_trace(ranks=2)
    told = render(trace, form, lang="zh", against=engine_trace(guarded=True, ranks=2))
    if form == "html":
        told = html.unescape(re.sub(r"<(style|script|svg|pre|code).*?</\1>|<[^>]+>", "\n", told, flags=re.DOTALL))
    for failure in {moment.failure.message for rank in trace for moment in rank.failures if moment.failure}:
        told = told.replace(failure, "")
    told = re.sub(r"^(`{3,}).*?^\1$|`[^`]+`|'[^'\n]+'|\"[^\"\n]+\"", "", told, flags=re.DOTALL | re.MULTILINE)
    sentences = [line.strip() for line in told.splitlines() if _ENGLISH.search(line)]
    assert sentences == []


@pytest.mark.parametrize("command", [["hazards", "DK101"], ["hazards"], ["explain", "-"]])
def test_a_command_speaks_the_language_that_it_is_asked_for(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("all is well\n"))
    assert main([*command, "--lang", "zh"]) == 0
    assert re.search("[\u4e00-\u9fff]{4}", capsys.readouterr().out)
    assert chosen() == "en"
