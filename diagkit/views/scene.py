"""A drawing as data: what stands where, in pixels from the upper left corner. Painters turn it into a figure or an SVG.

The rules: a view places its shapes here once, and both painters show the same; every text knows its width before it is
placed, so that nothing is cut off or written over by chance; a text that does not fit is wrapped or shortened on
purpose.
"""

from __future__ import annotations

import bisect
import functools
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from diagkit.errors import MissingDependency
from diagkit.views import palette

__all__ = ["Dot", "Line", "Polygon", "Rect", "Scene", "Text", "clean", "shorten", "text_width", "wrap"]

FONT = "DejaVu Sans"


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str | None
    radius: float = 3.0
    stroke: str | None = None
    stroke_width: float = 0.0
    tip: str = ""  # shown when the pointer rests on it, read by screen readers


@dataclass(frozen=True, slots=True)
class Polygon:
    points: tuple[tuple[float, float], ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """``x`` is the start, middle or end of the text, as ``anchor`` says; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = palette.INK
    bold: bool = False
    anchor: str = "start"
    tip: str = ""

    @property
    def width(self) -> float:
        return text_width(self.text, self.size, self.bold)

    @property
    def left(self) -> float:
        return self.x - self.width * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]


Shape = Rect | Polygon | Dot | Line | Text


@dataclass(slots=True)
class Scene:
    """Shapes in the order in which they are painted; ``title`` and ``text`` say the same in words."""

    width: float
    height: float
    title: str
    text: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)

    def texts(self) -> Iterator[Text]:
        return (shape for shape in self.shapes if isinstance(shape, Text))


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width in pixels. Sums the advances of the glyphs, as the painters do."""
    return sum(_advance(character, bold) for character in text) * size


def clean(text: str) -> str:
    """The text on one line, without control and bidirectional characters: names in a trace come from strangers."""
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    kept = (" " if c in "\n\r\t" else c for c in text if c in "\n\r\t" or unicodedata.category(c)[0] != "C")
    return " ".join("".join(kept).split())


def shorten(text: str, limit: float, size: float, bold: bool = False) -> str:
    """The text, its middle left out so that it is at most ``limit`` pixels wide."""
    room = int(5 * limit / size) + 2  # no letter is narrower than a fifth of its size: what lies between never shows
    if len(text) > 2 * room:
        text = text[:room] + text[-room:]
    elif text_width(text, size, bold) <= limit:
        return text

    def keeping(count: int) -> str:
        tail = (2 * count + 2) // 3  # the end of a qualified name tells more than its beginning
        return f"{text[: count - tail]}…{text[-tail:]}"

    counts = range(2, len(text) - 1)
    fit = bisect.bisect_right(counts, limit, key=lambda count: text_width(keeping(count), size, bold))
    return keeping(counts[fit - 1]) if fit else "…"


def wrap(text: str, limit: float, size: float, lines: int = 2, breaks: str = " ", bold: bool = False) -> list[str]:
    """The text on so many lines of at most ``limit`` pixels, broken after one of ``breaks``; the last is shortened."""
    found: list[str] = []
    rest = text
    while rest and len(found) < lines - 1 and text_width(rest, size, bold) > limit:
        width, cut = 0.0, 0
        for at, character in enumerate(rest):
            width += _advance(character, bold) * size
            if width > limit:
                break
            if character in breaks:
                cut = at + 1
        if cut == 0:
            break
        found.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    if rest:
        found.append(shorten(rest, limit, size, bold))
    return found or [""]


@functools.lru_cache(maxsize=4096)
def _advance(character: str, bold: bool) -> float:
    """Advance of one glyph at size 1."""
    font = _font(bold)
    if not font.get_char_index(ord(character)):
        # Another font will be found for it; matplotlib's font of last resort is wider than any real one.
        return 1.2 if unicodedata.east_asian_width(character) in "WF" else 1.0
    return float(font.load_char(ord(character), flags=_unscaled()).horiAdvance / font.units_per_EM)


@functools.lru_cache(maxsize=1)
def _unscaled():  # type: ignore[no-untyped-def]
    """The flag for a font's own units, so that no rounding to pixels creeps in. An enum since matplotlib 3.10."""
    from matplotlib import ft2font

    return ft2font.LoadFlags.NO_SCALE if hasattr(ft2font, "LoadFlags") else 1


@functools.lru_cache(maxsize=2)
def _font(bold: bool):  # type: ignore[no-untyped-def]  # matplotlib's FT2Font
    try:
        from matplotlib.font_manager import FontProperties, findfont, get_font
    except ImportError:
        raise MissingDependency("figures need matplotlib", remedy="pip install 'diagkit[report]'") from None
    return get_font(findfont(FontProperties(family=FONT, weight="bold" if bold else "normal")))
