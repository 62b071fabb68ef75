"""Writes pictures of the README and of pages, by name: factors, influence, pytorch, training.

Run: ``python -m scripts.draw_pictures NAME``. ``influence`` and ``pytorch`` execute the code of
their pages; ``pytorch`` needs torch and onnxscript. ``training`` reads the runs in ``RUNS``, lines
of the file that ``kfac-engine bench --suite train --runs`` writes.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.system.writing import write_rendered
from scripts.pictures import GREY, TUTORIALS, grey_svg

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"
RUNS = ROOT / "bench/results/2026-11-27-train-runs.jsonl"

# Colours that are legible on white and on black.
_RED, _BLUE, _YELLOW = "#d1495b", "#3b8ea5", "#c08a00"
# Task of the suite to the title of its panel.
PANELS = {
    "autoencoder": "autoencoder",
    "resnet": "ResNet",
    "transformer": "transformer",
}
# Method of the suite to its name and its colour.
METHODS = {"adam": ("Adam", _BLUE), "muon": ("Muon", _YELLOW), "kfac": ("K-FAC", _RED)}
_LAYERS = ("conv3.weight", "dense2.weight")
_QUERIES, _EXAMPLES = (0, 5, 8, 13), 5


def factors() -> Figure:
    """Return spectra of factors next to the damping: two layers after a batch of 256 digits."""
    engine = ke.Engine.from_onnx(demo_model("cnn"), loss="categorical", damping=1e-3)
    engine.observe({"image": digits()[0][:256]})
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    for name, axes in zip(_LAYERS, figure.subplots(1, len(_LAYERS)), strict=True):
        engine.factors[name].plot(ax=axes)
    return figure


def influence() -> Figure:
    """Draw rows of digits: a query, then the examples that lower and that raise its loss most."""
    names = _executed(ROOT / "docs/influence.md")
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


def pytorch() -> Figure:
    """Return the losses of the runs of the tutorial on PyTorch against CPU seconds."""
    import torch

    torch.set_num_threads(1)
    curves = _executed(TUTORIALS / "pytorch.md")["curves"]
    figure = Figure(figsize=(5, 3.2))
    axes = figure.subplots()
    for (name, (seconds, losses)), colour in zip(
        curves.items(), (_RED, _BLUE, _YELLOW), strict=True
    ):
        axes.plot(seconds, losses, label=name, color=colour)
    axes.set_xlabel("CPU seconds")
    axes.set_ylabel("test loss")
    axes.legend()
    return figure


def training() -> Figure:
    """Return validation losses of three methods against CPU seconds, with a panel for each task."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for method, (name, colour) in METHODS.items():
            seconds, losses = read_curve(task, method)
            axes.plot(seconds, losses, color=colour, label=name, lw=1.8)
        # The curve of K-FAC is the last; the loss of the initial model would compress all others.
        axes.set_ylim(0.9 * losses[-1], 0.6 * losses[0])
        axes.set_title(title, color=GREY, fontsize=11)
        axes.set_xlabel("CPU seconds", color=GREY)
        axes.tick_params(colors=GREY, which="both")
        axes.grid(alpha=0.3)
        axes.patch.set_alpha(0)
        for spine in axes.spines.values():
            spine.set_color(GREY)
    figure.axes[0].set_ylabel("validation loss", color=GREY)
    figure.axes[0].legend(labelcolor=GREY, framealpha=0)
    return figure


def read_curve(task: str, method: str) -> tuple[list[float], list[float]]:
    """Return the CPU seconds and the validation losses of the run of a method on a task."""
    with RUNS.open(encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    (run,) = (run for run in runs if (run["task"], run["method"]) == (task, method))
    return [point["cpu"] for point in run["curve"]], [point["loss"] for point in run["curve"]]


def _executed(page: Path) -> dict[str, Any]:
    """Return the names of a page after an execution of its code in an empty folder."""
    names: dict[str, Any] = {}
    code = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in code:
            exec(compile(block, page.name, "exec"), names)
    return names


# Name of each picture to its file and its figure.
FIGURES: Mapping[str, tuple[Path, Callable[[], Figure]]] = {
    "factors": (PICTURES / "factors.svg", factors),
    "influence": (PICTURES / "influence.svg", influence),
    "pytorch": (TUTORIALS / "pictures/pytorch.svg", pytorch),
    "training": (PICTURES / "training.png", training),
}


def write(path: Path, figure: Figure) -> None:
    """Write a figure to a file, by the ending of its name."""
    if path.suffix == ".svg":
        path.write_text(grey_svg(figure), encoding="utf-8")
    else:
        write_rendered(path, partial(figure.savefig, format="png", dpi=120, transparent=True))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        target, draw = FIGURES[name]
        write(target, draw())
        print(f"{target}: {target.stat().st_size} bytes")
