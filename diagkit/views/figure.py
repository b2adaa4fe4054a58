"""The Figure that every view returns: a matplotlib Figure that can also say itself in words and as a page.

The rules: no pyplot, so a view changes no global state and leaks no window; the page needs no script, no kernel and no
network; the words are the same facts as the picture.
"""

from __future__ import annotations

import html as html_module

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diagkit.language import chosen, tr
from diagkit.views import palette
from diagkit.views.painters import PER_INCH, paint_axes, svg
from diagkit.views.scene import Scene

__all__ = ["ViewFigure", "page"]

STYLE = f"""
.dk{{margin:0;color:{palette.INK};font:14px/1.5 'DejaVu Sans',Verdana,sans-serif;max-width:100%;overflow-x:auto}}
.dk summary{{color:{palette.MUTED};font-size:12px;cursor:pointer}}
.dk pre{{font:12px/1.45 'DejaVu Sans Mono',monospace;overflow-x:auto;margin:.5em 0}}
.dk pre{{color:{palette.INK};background:{palette.GROUND}}}
""".strip()


#: What a page may load: nothing, from nowhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class ViewFigure(Figure):
    """A drawn view. Save it with ``savefig``, read it with ``to_text()``, put it on a page with ``to_html()``."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(
            figsize=(scene.width / PER_INCH, scene.height / PER_INCH), dpi=PER_INCH, facecolor=palette.GROUND
        )
        FigureCanvasAgg(self)
        self.scene = scene
        paint_axes(scene, self.add_axes((0, 0, 1, 1)))

    @property
    def title(self) -> str:
        """The sentence that the figure proves."""
        return self.scene.title

    def to_text(self) -> str:
        """The same facts in words, for a terminal, an issue tracker or a screen reader."""
        return self.scene.text

    def to_svg(self) -> str:
        """One SVG element."""
        return svg(self.scene)

    def to_html(self, whole_page: bool = False) -> str:
        """The picture and its words, without script or outside reference: a fragment, or a whole page."""
        name = html_module.escape(self.title, quote=True)
        words = html_module.escape(self.to_text())
        fragment = (
            f'<figure class="dk" role="group" aria-label="{name}"><style>{STYLE}</style>'
            f"{self.to_svg()}<figcaption><details><summary>{tr('The same in words')}</summary>"
            f'<pre tabindex="0" aria-label="{tr("The figure in words")}">{words}</pre></details></figcaption></figure>'
        )
        return page(self.title, fragment, chosen()) if whole_page else fragment

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}>"


def page(title: str, body: str, lang: str = "en") -> str:
    """A whole page that may load nothing."""
    name = html_module.escape(title)
    return (
        f'<!DOCTYPE html><html lang="{lang}"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'</head><body style="margin:24px;background:{palette.GROUND}"><main>{body}</main></body></html>\n'
    )
