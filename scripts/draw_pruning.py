"""Write docs/pictures/pruning.svg, and print the tables of docs/pruning.md.

Run: ``python -m scripts.draw_pruning``. It reads the lines that ``scripts.measure_pruning``
writes.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

from scripts import markdown
from scripts.measure_pruning import (
    METHODS,
    PATTERN,
    RESULTS,
    RETRAINED,
    ROOT,
    SPARSITIES,
    STEPS,
    Pruned,
    read_results,
)
from scripts.pictures import GREY, grey_svg

PICTURE = ROOT / "docs/pictures/pruning.svg"
# Data to the title of its panel.
PANELS = {"digits": "digits", "Fashion-MNIST": "Fashion-MNIST"}
# Method to its colour, which is legible on white and on black.
_COLOURS = {"magnitude": "#3b8ea5", "obd": "#c08a00", "obs": "#d1495b"}


def accuracies(
    entries: list[Pruned], data: str, method: str, zeros: float | str, steps: int = 0
) -> list[float]:
    """Return the accuracies of all seeds, in the order of the seeds."""
    key = data, method, zeros, steps
    chosen = [e for e in entries if (e.data, e.method, e.zeros, e.steps) == key]
    return [entry.accuracy for entry in sorted(chosen, key=lambda entry: entry.seed)]


def draw(entries: list[Pruned]) -> Any:
    """Return a figure with a panel for each data set: accuracy against sparsity by method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (data, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        before = accuracies(entries, data, "none", 0.0)
        for method, colour in _COLOURS.items():
            seeds = [accuracies(entries, data, method, sparsity) for sparsity in SPARSITIES]
            places = [100 * sparsity for sparsity in SPARSITIES]
            axes.plot(places, seeds, color=colour, alpha=0.3, lw=0.8)
            axes.plot(places, [median(row) for row in seeds], color=colour, label=method, lw=2)
        axes.axhline(median(before), color=GREY, linestyle="--", lw=1, label="before pruning")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("zeros in %")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.axes[0].legend(loc="lower left")
    return figure


def tables(entries: list[Pruned]) -> str:
    """Return the tables of the page in Markdown: after the pruning, and after more training."""
    rows = (0.5, 0.7, 0.9, 0.95, PATTERN)
    return "\n".join(
        "\n".join(_table(entries, data, *choice))
        for choice in ((rows, 0), (RETRAINED, STEPS))
        for data in PANELS
    )


def _table(
    entries: list[Pruned], data: str, rows: tuple[float | str, ...], steps: int
) -> Iterator[str]:
    """Yield the lines of a table: rows of zeros, columns of methods."""
    lines = []
    for zeros in rows:
        name = f'`"{zeros}"`' if isinstance(zeros, str) else f"{100 * zeros:g} %"
        cells = (accuracies(entries, data, method, zeros, steps) for method in METHODS)
        lines.append((name, *(", ".join(f"{a:.3f}" for a in row) for row in cells)))
    yield from markdown.table((data, "magnitude", '`"obd"`', '`"obs"`'), lines)
    yield ""


if __name__ == "__main__":
    measured = read_results(RESULTS, Pruned)
    PICTURE.write_text(grey_svg(draw(measured)), encoding="utf-8")
    print(tables(measured))
