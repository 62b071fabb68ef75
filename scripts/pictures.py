"""Pictures of the tutorials: figures of matplotlib as SVG inside a page.

The site executes the blocks of a tutorial while it is built. A block prints ``svg(figure)`` into
the page.
"""

import io
import re
from pathlib import Path
from typing import Any

# The folder of the tutorials and of the models that they read.
TUTORIALS = Path(__file__).resolve().parent.parent / "docs/tutorials"

# Stands for the colour of the text of the page, which is dark or light by the mode of the reader.
GREY = "#808080"
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "tutorial"}  # text as text; repeatable names
# A style inside a page would apply to the page, and names of groups to its links.
_UNUSED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"", re.S)
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


def svg(figure: Any, width: str = "30em") -> str:
    """Return a figure as an SVG element that has the text colour of its page and fits any width.

    Texts, axes and ticks of the figure of matplotlib change their colours. A screen narrower than
    ``width``, in units of CSS, shows a smaller picture.
    """
    text = _UNUSED.sub("", grey_svg(figure)).replace(GREY, "currentColor")
    size = f'style="width: 100%; max-width: {width}; height: auto" role="img"'
    return _SIZE.sub("", text[text.index("<svg") :], count=2).replace("<svg", f"<svg {size}", 1)


def grey_svg(figure: Any) -> str:
    """Return a figure as a file in SVG, with grey text that is legible on white and on black."""
    import matplotlib as mpl

    for axes in figure.axes:
        _recolour(axes)
    file = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        figure.savefig(
            file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    return file.getvalue()


def _recolour(axes: Any) -> None:
    axes.tick_params(colors=GREY, which="both", labelsize="small")
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    if axes.get_legend() is not None:
        axes.get_legend().set_frame_on(False)
        texts += axes.get_legend().get_texts()
    for text in texts:
        text.set_color(GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
