"""Many names as few patterns: ``layers.{0..27}.self_attn.{q,k,v,o}_proj.weight`` stands for 112 of them.

The rules: a pattern stands for exactly the names it was made of, never for one more; written out again (`expand`) it
gives those names back; names keep the order in which they came; a name that fits nowhere stays as it is.

A pattern is a product of alternatives, one set a dotted segment. It grows by joining patterns that differ in one
segment alone, and a join of products along one axis is a product again: that is why it never covers too much.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Pattern", "compress", "expand"]

#: Names of more segments than this stay as they are; no model has them, and a hostile trace may.
SEGMENT_LIMIT = 64

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})", re.ASCII)
_TOKENS = re.compile(r"[0-9]+|[^\W\d_]+|.", re.DOTALL)
_SPECIAL = re.compile(r"([{},\\])")
#: Last segments that may share a pattern although they have no part in common.
_LEAVES = frozenset({"weight", "bias"})

Segments = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """``names`` and the one text that stands for all of them.

    >>> print(compress(["a.0.w", "a.1.w", "a.2.w"])[0])
    a.{0..2}.w ×3
    """

    text: str
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return self.text if self.count == 1 else f"{self.text} ×{self.count}"


def compress(names: Iterable[str]) -> list[Pattern]:
    """The patterns that stand for these names, in the order of their first names; a name that comes twice counts once.

    >>> [str(p) for p in compress(["norm.weight", "l.0.q_proj.weight", "l.0.k_proj.weight", "l.1.q_proj.weight",
    ...                            "l.1.k_proj.weight"])]
    ['norm.weight', 'l.{0,1}.{q,k}_proj.weight ×4']
    """
    distinct = list(dict.fromkeys(names))
    entries: dict[Segments, list[int]] = {}
    alone: list[tuple[int, Pattern]] = []
    for index, name in enumerate(distinct):
        parts = name.split(".", SEGMENT_LIMIT)
        if len(parts) > SEGMENT_LIMIT:
            alone.append((index, Pattern(_escape(name), (name,))))
        else:
            entries[tuple((part,) for part in parts)] = [index]
    deepest = max(map(len, entries), default=0)
    for at in range(deepest):
        entries = _join(entries, at, _numbers)
    for at in reversed(range(deepest)):
        entries = _join(entries, at, _last_word)
        entries = _join(entries, at, _first_word)
    for at in reversed(range(deepest)):
        entries = _join(entries, at, _leaf)
    found = alone
    for segments, indices in entries.items():
        indices.sort()
        found.append((indices[0], Pattern(_text(segments), tuple(distinct[i] for i in indices))))
    return [pattern for _, pattern in sorted(found, key=lambda entry: entry[0])]


def expand(text: str) -> Iterator[str]:
    """Every name that a pattern's text stands for: the inverse of `compress`, for checks and for filters.

    Raises:
        ValueError: a brace is not closed.

    >>> list(expand("l.{0,1}.{q,k}_proj"))
    ['l.0.q_proj', 'l.0.k_proj', 'l.1.q_proj', 'l.1.k_proj']
    """
    return _expand(_parse(text))


def _expand(pieces: Sequence[list[str | range]]) -> Iterator[str]:
    # Ranges stay lazy, so that looking at the first names of a huge one costs little.
    if not pieces:
        yield ""
        return
    for item in pieces[0]:
        for word in (item,) if isinstance(item, str) else map(str, item):
            for rest in _expand(pieces[1:]):
                yield word + rest


def _parse(text: str) -> list[list[str | range]]:
    """What the text is made of: pieces, each a list of alternatives."""
    pieces: list[list[str | range]] = []
    items: list[str | range] = []
    word, plain, inside = "", True, False

    def item() -> str | range:
        span = _RANGE.fullmatch(word) if inside and plain else None
        return range(int(span[1]), int(span[2]) + 1) if span else word

    characters = iter(text)
    for character in characters:
        if character == "\\":
            word += next(characters, "\\")
            plain = False
        elif character == "{" and not inside:
            pieces.append([word])
            word, plain, inside, items = "", True, True, []
        elif inside and character in ",}":
            items.append(item())
            word, plain = "", True
            if character == "}":
                pieces.append(items)
                inside = False
        else:
            word += character
    if inside:
        raise ValueError(f"a brace is not closed in {text!r}")
    return [*pieces, [word]]


Family = Callable[[tuple[str, ...]], object]


def _join(entries: dict[Segments, list[int]], at: int, family: Family) -> dict[Segments, list[int]]:
    """Joins the patterns that differ in segment ``at`` alone and whose alternatives there are of one family."""
    buckets: dict[object, list[Segments]] = {}
    families: dict[tuple[str, ...], object] = {}  # few words stand at one place, in however many names
    joined: dict[Segments, list[int]] = {}
    for segments, indices in entries.items():
        words = segments[at] if at < len(segments) else ()
        if words not in families:
            families[words] = family(words) if words else None
        if (key := families[words]) is None:
            joined[segments] = indices
        else:
            buckets.setdefault((segments[:at], segments[at + 1 :], key), []).append(segments)
    for members in buckets.values():
        first = members[0]
        if len(members) == 1:
            joined[first] = entries[first]
        else:
            words = tuple(word for segments in members for word in segments[at])
            joined[(*first[:at], words, *first[at + 1 :])] = [i for segments in members for i in entries[segments]]
    return joined


# Families: what the alternatives of one segment have in common; None for alternatives that nothing may join.


def _numbers(words: tuple[str, ...]) -> object:
    return "number" if all(map(_NUMBER.fullmatch, words)) else None


def _last_word(words: tuple[str, ...]) -> object:
    return _shared(words, -1)


def _first_word(words: tuple[str, ...]) -> object:
    return _shared(words, 0)


def _shared(words: tuple[str, ...], end: int) -> object:
    tokens = [_tokens(word) for word in words]
    ends = {split[end] for split in tokens}
    return ends.pop() if len(ends) == 1 and all(len(s) > 1 and s[end].isalpha() for s in tokens) else None


def _leaf(words: tuple[str, ...]) -> object:
    return "leaf" if _LEAVES.issuperset(words) else None


def _tokens(word: str) -> list[str]:
    """``"conv2d_1"`` -> ``["conv", "2", "d", "_", "1"]``; together they are the word again."""
    return _TOKENS.findall(word) or [""]


def _text(segments: Segments) -> str:
    return ".".join(map(_alternatives, segments))


def _alternatives(words: tuple[str, ...]) -> str:
    if len(words) == 1:
        return _escape(words[0])
    tokens = [_tokens(word) for word in words]
    room = min(map(len, tokens)) - 1  # every middle keeps at least one token
    front = next((i for i in range(room) if len({s[i] for s in tokens}) > 1), max(room, 0))
    back = next((i for i in range(room - front) if len({s[-1 - i] for s in tokens}) > 1), max(room - front, 0))
    middles = ["".join(s[front : len(s) - back]) for s in tokens]
    numbers = all(map(_NUMBER.fullmatch, middles))
    items = _ranges(sorted(map(int, middles))) if numbers else [_escape(middle) for middle in middles]
    start, end = tokens[0][:front], tokens[0][len(tokens[0]) - back :]
    return _escape("".join(start)) + "{" + ",".join(items) + "}" + _escape("".join(end))


def _ranges(numbers: list[int]) -> Iterator[str]:
    """``[0, 1, 2, 5]`` -> ``"0..2", "5"``; two neighbours stay two numbers, which reads better."""
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        if len(run) > 2:
            yield f"{run[0]}..{run[-1]}"
        else:
            yield from map(str, run)


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
