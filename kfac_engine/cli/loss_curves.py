"""The demo's picture: loss curves of the methods against steps and against seconds."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from kfac_engine.cli.comparison import Run
from kfac_engine.system.writing import write_rendered


def draw(runs: Mapping[str, Run], path: Path) -> bool:
    """Draw the best run of each method into a PNG; return False if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        by_step.plot(run.losses, label=name)
        by_time.plot(np.cumsum(run.seconds), run.losses[: len(run.seconds)], label=name)
    by_step.set(xlabel="step", ylabel="loss of the batch", yscale="log")
    by_time.set(xlabel="seconds")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.suptitle(
        "Handwritten digits, small CNN: best of nine learning rates, and K-FAC's defaults"
    )
    write_rendered(path, partial(figure.savefig, format="png", dpi=120))
    return True
