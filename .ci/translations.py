"""Renew the catalogues of diagkit/catalogues from the code (make translations).

Every sentence that the code or a template marks (`tr`, `trn`, `msg`, `msgn` of `diagkit.language`) and every text of
every hazard gets an entry in each language's .po; entries that nothing uses any more go. Translations that are there
are kept, never guessed. Then the .po is compiled to the .mo that diagkit reads.
"""

from __future__ import annotations

import ast
import datetime
import io
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = pathlib.Path(__file__).resolve().parent.parent
CATALOGUES = ROOT / "diagkit" / "catalogues"
KEYWORDS: dict[str, tuple[int, ...] | None] = {"tr": None, "trn": (1, 2), "msg": None, "msgn": (1, 2)}
HEAD: dict[str, Any] = {
    "project": "diagkit",
    "version": "1",
    "header_comment": "# What diagkit says, made by `make translations`; the translations are written by hand.",
    "fuzzy": False,
    "msgid_bugs_address": "see README.md",
    "last_translator": "the authors of diagkit",
    "language_team": "the authors of diagkit",
    # No dates of today: a renewal that finds nothing new changes no file.
    "creation_date": datetime.datetime(2026, 11, 29, tzinfo=datetime.timezone.utc),
    "revision_date": datetime.datetime(2026, 11, 29, tzinfo=datetime.timezone.utc),
    "charset": "utf-8",
}
TEMPLATES = [("views/report/**.html", "jinja2")]


def wanted() -> Catalog:
    """Everything that is told to people, with the files in which it stands."""
    found = Catalog(project="diagkit", charset="utf-8")
    for path in sorted((ROOT / "diagkit").rglob("*.py")):
        for message in marked(path):
            found.add(message, locations=[(path.relative_to(ROOT).as_posix(), 1)])
    for name, _, message, _, _ in extract_from_dir(ROOT / "diagkit", TEMPLATES, keywords=KEYWORDS):
        found.add(message, locations=[(f"diagkit/{name}", 1)])
    for text, where in hazards():
        found.add(text, locations=[(where, 1)])
    return found


def marked(path: pathlib.Path) -> Iterator[str | tuple[str, ...]]:
    """The texts that a module marks, also a mark inside another's arguments, which Babel's own reader passes over."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KEYWORDS:
            count = len(KEYWORDS[node.func.id] or (1,))
            words = [a.value for a in node.args[:count] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if len(words) == count:
                yield words[0] if count == 1 else tuple(words)


def hazards() -> list[tuple[str, str]]:
    """The texts of all rules, and the words that frame them."""
    from diagkit.diagnosis.rule import HEADINGS, SEVERITIES, UNTRANSLATED, all_rules

    here = "diagkit/diagnosis/rule.py"
    found = [(word, here) for word in (*HEADINGS, *SEVERITIES)]
    for rule in all_rules():
        where = f"diagkit/diagnosis/rules/{rule.family}.py"
        found.append((rule.english_title, where))
        found += [(part, where) for name, part in rule.english.items() if name not in UNTRANSLATED]
    return found


def renewed(language: str) -> Catalog:
    """The catalogue of a language with exactly the wanted entries; new ones are empty."""
    template = wanted()
    path = CATALOGUES / f"{language}.po"
    catalogue = read(language) if path.exists() else Catalog(language, **HEAD)
    template.creation_date = HEAD["creation_date"]
    catalogue.update(template, no_fuzzy_matching=True)
    catalogue.obsolete.clear()
    return catalogue


def read(language: str) -> Catalog:
    """The catalogue as it is."""
    with (CATALOGUES / f"{language}.po").open("rb") as file:
        return read_po(file, locale=language)


def compiled(catalogue: Catalog) -> bytes:
    """The form that gettext reads: what is translated, and nothing else, so that the rest stays English."""
    out, told = io.BytesIO(), Catalog(catalogue.locale, **HEAD)
    for message in catalogue:
        if message.id and all(texts(message.string)):
            told.add(message.id, message.string)
    write_mo(out, told)
    return out.getvalue()


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from diagkit.language import LANGUAGES

    CATALOGUES.mkdir(exist_ok=True)
    for language in LANGUAGES[1:]:  # the first is the code's own
        catalogue = renewed(language)
        with (CATALOGUES / f"{language}.po").open("wb") as file:
            write_po(file, catalogue, width=120, sort_by_file=True, include_lineno=False, ignore_obsolete=True)
        (CATALOGUES / f"{language}.mo").write_bytes(compiled(catalogue))
        missing = [message for message in catalogue if message.id and not all(texts(message.string))]
        print(f"{language}: {len(catalogue)} texts, {len(missing)} not translated")
    return 0


def texts(value: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """A message's text, or its texts for one and for many."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value or "",)


if __name__ == "__main__":
    sys.exit(main())
