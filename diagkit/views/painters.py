"""Two painters of one scene: matplotlib for a Figure, and SVG for pages. Neither decides where anything stands."""

from __future__ import annotations

import unicodedata
from html import escape
from typing import TYPE_CHECKING

from diagkit.views import palette
from diagkit.views.scene import FONT, Dot, Line, Polygon, Rect, Scene, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["paint_axes", "svg"]

#: Pixels of a scene per inch of a figure.
PER_INCH = 100.0


def paint_axes(scene: Scene, axes: Axes) -> None:
    """Paint into axes that fill their figure, one pixel of the scene to one of the figure at 100 dpi."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, FancyBboxPatch
    from matplotlib.patches import Polygon as Area

    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    points = 72 / PER_INCH
    for order, shape in enumerate(scene.shapes, 1):
        match shape:
            case Rect(x, y, width, height, fill, radius, stroke, stroke_width):
                axes.add_patch(FancyBboxPatch(
                    (x, y), width, height, boxstyle=f"round,pad=0,rounding_size={min(radius, width / 2, height / 2)}",
                    facecolor=fill or "none", edgecolor=stroke or "none", linewidth=stroke_width * points, zorder=order,
                ))  # fmt: skip
            case Polygon(corners, fill):
                axes.add_patch(Area(corners, closed=True, facecolor=fill, edgecolor="none", zorder=order))
            case Dot(x, y, radius, fill):
                axes.add_patch(Circle((x, y), radius, facecolor=fill, edgecolor="none", zorder=order))
            case Line(x1, y1, x2, y2, colour, width):
                axes.add_line(Line2D([x1, x2], [y1, y2], color=colour, linewidth=width * points, zorder=order))
            case Text(x, y, text, size, colour, bold, anchor):
                axes.text(
                    x, y, text, fontsize=size * points, color=colour, fontweight="bold" if bold else "normal",
                    fontfamily=[FONT, "sans-serif"], ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                    va="baseline", zorder=order, parse_math=False,
                )  # fmt: skip


def svg(scene: Scene) -> str:
    """An SVG element that needs nothing else: it scales with the page, and a screen reader reads its title."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(scene.width)} {_n(scene.height)}" '
        f'width="{_n(scene.width)}" height="{_n(scene.height)}" role="img" '
        f'aria-label="{_attribute(scene.title)}" style="max-width:100%;height:auto;'
        f"font-family:'{FONT}',Verdana,sans-serif\">",
        f'<rect width="{_n(scene.width)}" height="{_n(scene.height)}" rx="6" fill="{palette.GROUND}"/>',
    ]
    parts += [_shape(shape) for shape in scene.shapes]
    return "".join([*parts, "</svg>"])


def _shape(shape: object) -> str:
    match shape:
        case Rect(x, y, width, height, fill, radius, stroke, stroke_width, tip):
            line = f' stroke="{stroke}" stroke-width="{_n(stroke_width)}"' if stroke else ""
            size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
            return _tipped("rect", f'{size} fill="{fill or "none"}"{line}', "", tip)
        case Polygon(corners, fill):
            points = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
            return f'<polygon points="{points}" fill="{fill}" pointer-events="none"/>'
        case Dot(x, y, radius, fill):
            return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}" pointer-events="none"/>'
        case Line(x1, y1, x2, y2, colour, width):
            ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
            return f'<line {ends} stroke="{colour}" stroke-width="{_n(width)}"/>'
        case Text(x, y, text, size, colour, bold, anchor, tip):
            # textLength: whatever font the page has, the text takes the room that was measured for it. Of another
            # script only an upper bound is known, which would stretch it.
            attributes = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{colour}"'
            attributes += ' font-weight="bold"' if bold else ""
            attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
            if len(text) > 1 and all(unicodedata.east_asian_width(character) not in "WF" for character in text):
                attributes += f' textLength="{_n(shape.width)}" lengthAdjust="spacingAndGlyphs"'
            return _tipped("text", attributes, escape(text), tip)
    raise TypeError(f"no such shape: {shape!r}")


def _tipped(tag: str, attributes: str, body: str, tip: str) -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f"<{tag} {attributes}>{title}{body}</{tag}>" if title or body else f"<{tag} {attributes}/>"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _attribute(text: str) -> str:
    return escape(text, quote=True)
