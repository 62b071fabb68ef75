"""A chart for each suite: the time of every contender beside ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kfac_engine.bench.contenders import OURS
from kfac_engine.bench.measure import Row
from kfac_engine.errors import BackendError

_INCHES_A_BAR, _WIDTH = 0.22, 9.0


def draw(folder: Path, suites: Mapping[str, Sequence[Row]]) -> None:
    """Write ``<suite>.png`` for each suite.

    Args:
        folder: Made if it is not there.
        suites: Name to rows.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "charts need matplotlib: pip install 'kfac-engine[plot]', or leave out --plot."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in suites.items():
        figure = Figure(figsize=(_WIDTH, 1.5 + _INCHES_A_BAR * len(rows)), layout="constrained")
        axes = figure.subplots()
        colours = {who: f"C{i}" for i, who in enumerate(dict.fromkeys(r.contender for r in rows))}
        labels = [f"{row.case} · {row.contender}" for row in rows]
        axes.barh(
            labels,
            [1e3 * row.seconds.median for row in rows],
            color=[colours[row.contender] for row in rows],
            # The bars of ours stand out in print, too.
            hatch=["//" if row.contender == OURS else "" for row in rows],
        )
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("milliseconds (median, logarithmic)")
        axes.set_title(f"Suite {name}", loc="left")
        figure.savefig(folder / f"{name}.png", dpi=120)
