"""Write docs/pictures/influence.svg: held-out digits with the examples that changed them most.

Run: ``python -m scripts.draw_influence``. It executes the page docs/influence.md.
"""

import contextlib
import re
import tempfile
from typing import Any

import numpy as np

from scripts.measure_pruning import ROOT
from scripts.pictures import GREY, grey_svg

PAGE = ROOT / "docs/influence.md"
PICTURE = ROOT / "docs/pictures/influence.svg"
_QUERIES, _EXAMPLES = (0, 5, 8, 13), 5


def executed() -> dict[str, Any]:
    """Return the names of the page after an execution of its code."""
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S):
            exec(compile(code, PAGE.name, "exec"), names)
    return names


def draw(names: dict[str, Any]) -> Any:
    """Return a figure with a row for each query: the query, helpful and harmful examples."""
    from matplotlib.figure import Figure

    images, labels, scores = names["images"], names["labels"], names["relative"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    grid = figure.subplots(len(_QUERIES), 2 * _EXAMPLES + 1)
    for row, query in zip(grid, _QUERIES, strict=True):
        order = np.argsort(-scores[query])
        places = [1400 + query, *order[:_EXAMPLES], *order[::-1][:_EXAMPLES]]
        for axes, place in zip(row, places, strict=True):
            axes.imshow(images[place, 0], cmap="gray_r")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlabel(str(labels[place]), color=GREY)
    titles = {0: "query", 3: "lower its loss", 8: "raise its loss"}
    for column, title in titles.items():
        grid[0, column].set_title(title, fontsize=10)
    return figure


if __name__ == "__main__":
    PICTURE.write_text(grey_svg(draw(executed())), encoding="utf-8")
    print(f"{PICTURE.stat().st_size} bytes")
