"""Write docs/pictures/padding.svg, and print the table of docs/losses.md.

Run: ``python -m scripts.draw_padding``. It reads the lines that ``scripts.measure_padding`` writes.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from scripts.measure_padding import FORMS, RESULTS, ROOT, SEEDS, Point
from scripts.pictures import GREY, grey_svg

PICTURE = ROOT / "docs/pictures/padding.svg"
# Losses to which the table has the CPU seconds.
LOSSES = (2.0, 1.8, 1.6, 1.4, 1.3)
# Form of the held-out lines to the title of its panel.
PANELS = {"padded": "held-out lines, each alone", "cut": "held-out lines, joined and cut"}
# Form of the training to its name and its colour, which is legible on white and on black.
_TRAINED = {"padded": ("lines with padding", "#d1495b"), "cut": ("pieces", "#3b8ea5")}


def read() -> list[Point]:
    """Return the evaluations."""
    with RESULTS.open(encoding="utf-8") as file:
        return [Point(**json.loads(line)) for line in file]


def curve(points: list[Point], form: str, seed: int) -> list[Point]:
    """Return the evaluations of a run."""
    return [point for point in points if (point.form, point.seed) == (form, seed)]


def seconds_to(loss: float, run: list[Point]) -> float:
    """Return the CPU seconds after which a run has a loss on single lines; NaN for never.

    Between two evaluations, the loss is a straight line.
    """
    for before, after in pairwise(run):
        if after.padded <= loss < before.padded:
            part = (before.padded - loss) / (before.padded - after.padded)
            return before.cpu + part * (after.cpu - before.cpu)
    return float("nan")


def table(points: list[Point]) -> Iterator[str]:
    """Yield the lines of the table of the page; a cell has a number for each seed."""
    yield "| | lines with padding | pieces |"
    yield "|---|---|---|"
    runs = {form: [curve(points, form, seed) for seed in SEEDS] for form in FORMS}
    rows = {
        f"CPU seconds to {loss}": lambda run, loss=loss: f"{seconds_to(loss, run):.1f}"
        for loss in LOSSES
    }
    rows |= {
        "last loss": lambda run: f"{run[-1].padded:.3f}",
        "last loss of pieces": lambda run: f"{run[-1].cut:.3f}",
        "characters a CPU second": lambda run: f"{run[-1].characters / run[-1].cpu:.0f}",
    }
    for name, cell in rows.items():
        yield f"| {name} | {' | '.join(', '.join(map(cell, runs[form])) for form in FORMS)} |"


def draw(points: list[Point]) -> Any:
    """Return a figure with a panel for each form of the held-out lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (panel, title) in zip(
        figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True
    ):
        for form, (name, colour) in _TRAINED.items():
            # The loss of the initial model would compress all others.
            runs = [curve(points, form, seed)[2:] for seed in SEEDS]
            for run in runs:
                losses = [getattr(point, panel) for point in run]
                axes.plot([point.cpu for point in run], losses, color=colour, alpha=0.35, lw=0.8)
            marks = list(zip(*runs, strict=True))
            axes.plot(
                [median(point.cpu for point in mark) for mark in marks],
                [median(getattr(point, panel) for point in mark) for mark in marks],
                color=colour, label=name, lw=2,
            )  # fmt: skip
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("CPU seconds")
        axes.set_ylim(1.1, 2.6)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("loss of a character")
    figure.axes[0].legend(loc="upper right")
    figure.axes[0].axhline(LOSSES[-1], color=GREY, linestyle="--", lw=1)
    return figure


if __name__ == "__main__":
    measured = read()
    PICTURE.write_text(grey_svg(draw(measured)), encoding="utf-8")
    print("\n".join(table(measured)))
