"""The demo's picture: held-out losses of the methods against steps and against CPU seconds."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine.cli.comparison import Run
from kfac_engine.system.writing import write_rendered

# The medians are drawn at so many places of the axis.
_PLACES = 100


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> bool:
    """Draw the runs of each method into a PNG; return False if matplotlib is missing.

    Args:
        runs: Method to its runs, one for each seed.
        path: File of the picture.

    Returns:
        Whether the picture is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for index, (name, of_method) in enumerate(runs.items()):
        losses = [list(run.evaluations.values()) for run in of_method]
        _draw_method(
            by_step, f"C{index}", name, [list(run.evaluations) for run in of_method], losses
        )
        seconds = [[run.seconds[step - 1] for step in run.evaluations] for run in of_method]
        _draw_method(by_time, f"C{index}", name, seconds, losses)
    by_step.set(xlabel="steps", ylabel="loss of held-out digits", yscale="log")
    by_time.set(xlabel="CPU seconds of one thread")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3, which="both")
    count = len(next(iter(runs.values())))
    figure.suptitle(
        f"Handwritten digits, small CNN: median of {count} seeds, thin lines: each seed"
    )
    write_rendered(path, partial(figure.savefig, format="png", dpi=120))
    return True


def _draw_method(
    axes: Any,
    colour: str,
    name: str,
    places: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
) -> None:
    """Draw the curve of each seed, and the median where all seeds have a loss."""
    for x, y in zip(places, losses, strict=True):
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    common = median_curve(places, losses)
    axes.plot(*common, color=colour, label=name, linewidth=2)


def median_curve(
    places: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]
) -> tuple[Any, Any]:
    """Return the median of piecewise linear curves, between their common ends.

    Args:
        places: Ascending places of each curve.
        losses: Values of each curve.

    Returns:
        Places and medians.
    """
    ends = max(x[0] for x in places), min(x[-1] for x in places)
    x = np.linspace(*ends, _PLACES)
    curves = [
        np.interp(x, x_of_curve, values) for x_of_curve, values in zip(places, losses, strict=True)
    ]
    return x, np.median(curves, axis=0)
