"""Write docs/pictures/training.png: validation losses of K-FAC, Muon and Adam against CPU seconds.

Run: ``python -m scripts.draw_training``. It reads the runs in ``RUNS``, lines of the file that
``kfac-engine bench --suite train --runs`` writes.
"""

import json
from functools import partial
from pathlib import Path

from kfac_engine.system.writing import write_rendered

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "bench/results/2026-11-26-train-runs.jsonl"
PICTURE = ROOT / "docs/pictures/training.png"
# Task of the suite to the title of its panel.
PANELS = {
    "autoencoder": "autoencoder",
    "resnet": "ResNet",
    "transformer": "transformer",
}
# Method of the suite to its name and its colour, which is legible on white and on black.
METHODS = {"adam": ("Adam", "#3b8ea5"), "muon": ("Muon", "#c08a00"), "kfac": ("K-FAC", "#d1495b")}
_GREY = "#808080"


def read_curve(task: str, method: str) -> tuple[list[float], list[float]]:
    """Return the CPU seconds and the validation losses of the run of a method on a task."""
    with RUNS.open(encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    (run,) = (run for run in runs if (run["task"], run["method"]) == (task, method))
    return [point["cpu"] for point in run["curve"]], [point["loss"] for point in run["curve"]]


def draw(path: Path) -> None:
    """Draw a panel for each task, with a curve for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.1), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for method, (name, colour) in METHODS.items():
            seconds, losses = read_curve(task, method)
            axes.plot(seconds, losses, color=colour, label=name, lw=1.8)
        # The curve of K-FAC is the last; the loss of the initial model would compress all others.
        axes.set_ylim(0.9 * losses[-1], 0.6 * losses[0])
        axes.set_title(title, color=_GREY, fontsize=11)
        axes.set_xlabel("CPU seconds", color=_GREY)
        axes.tick_params(colors=_GREY, which="both")
        axes.grid(alpha=0.3)
        axes.patch.set_alpha(0)
        for spine in axes.spines.values():
            spine.set_color(_GREY)
    figure.axes[0].set_ylabel("validation loss", color=_GREY)
    figure.axes[0].legend(labelcolor=_GREY, framealpha=0)
    write_rendered(path, partial(figure.savefig, format="png", dpi=120, transparent=True))


if __name__ == "__main__":
    draw(PICTURE)
