"""Charts of suites: times of all contenders for each case, or growth along each axis."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac_engine.bench.contenders import CONTENDERS, OURS
from kfac_engine.bench.measure import Row
from kfac_engine.bench.scaling import Point
from kfac_engine.errors import BackendError, InputError
from kfac_engine.system.writing import write_rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES_A_BAR, _INCHES_A_CASE, _WIDTH, _PANEL = 0.16, 0.14, 9.0, 4.6
_DOTS_AN_INCH = 120
# A contender has the same colour in every chart.
_COLOURS = {who: f"C{i}" for i, who in enumerate(CONTENDERS)}


def chart_folder(folder: Path) -> Path:
    """Return a folder for charts; an error is raised before anything is measured."""
    if find_spec("matplotlib") is None:
        raise BackendError(
            "charts need matplotlib: pip install 'kfac-engine[plot]', or leave out --plot."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {folder}: {error.strerror}.") from error
    return folder


def draw(
    folder: Path, comparisons: Mapping[str, Sequence[Row]], growth: Sequence[Point] = ()
) -> None:
    """Write ``<suite>.png`` for each suite, and ``scaling.png``."""
    from matplotlib.figure import Figure

    for name, rows in comparisons.items():
        height = 1.2 + _INCHES_A_BAR * len(rows) + _INCHES_A_CASE * len(_by_case(rows))
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        _draw_comparison(figure.subplots(), name, rows)
        _write(folder / f"{name}.png", figure)
    if growth:
        figure = Figure(figsize=(_WIDTH, _PANEL), layout="constrained")
        times, memory = figure.subplots(1, 2)
        _draw_growth(times, memory, growth)
        _write(folder / "scaling.png", figure)


def _write(path: Path, figure: "Figure") -> None:
    write_rendered(path, partial(figure.savefig, format="png", dpi=_DOTS_AN_INCH))


def _draw_comparison(axes: Any, name: str, rows: Sequence[Row]) -> None:
    """Draw a group of bars for each case, a colour for each contender, quartiles as whiskers."""
    cases = _by_case(rows)
    places, ticks, top = {}, [], 0.0
    for group in cases.values():
        for row in group:
            places[row.case, row.contender] = top
            top += 1
        ticks.append(top - (len(group) + 1) / 2)
        top += _INCHES_A_CASE / _INCHES_A_BAR
    for who in (who for who in CONTENDERS if any(row.contender == who for row in rows)):
        ours = [row for row in rows if row.contender == who]
        middle = [1e3 * row.seconds.median for row in ours]
        # Equal times may differ by rounding once they are weighted.
        below = [max(0.0, m - 1e3 * r.seconds.low) for m, r in zip(middle, ours, strict=True)]
        above = [max(0.0, 1e3 * r.seconds.high - m) for m, r in zip(middle, ours, strict=True)]
        axes.barh(
            [places[row.case, who] for row in ours], middle, height=0.9, label=who,
            xerr=(below, above), error_kw={"elinewidth": 0.8}, color=_COLOURS[who],
            # Hatched bars of this package can be recognized in print.
            hatch="//" if who == OURS else "",
        )  # fmt: skip
    axes.set_yticks(ticks, list(cases))
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("milliseconds, logarithmic (median; whiskers: quartiles)")
    axes.set_title(f"Suite {name}: shorter is faster", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_growth(times: Any, memory: Any, points: Sequence[Point]) -> None:
    """Draw time and memory along each axis, relative to its smallest size."""
    for axis in dict.fromkeys(point.axis for point in points):
        axis_points = [point for point in points if point.axis == axis]
        sizes = [point.size / axis_points[0].size for point in axis_points]
        medians = [point.seconds.median / axis_points[0].seconds.median for point in axis_points]
        peaks = [point.peak_bytes / max(1, axis_points[0].peak_bytes) for point in axis_points]
        times.plot(sizes, medians, marker="o", label=f"{axis}: size^{axis_points[0].exponent:.2f}")
        memory.plot(
            sizes, peaks, marker="o", label=f"{axis}: size^{axis_points[0].memory_exponent:.2f}"
        )
    for panel, title in ((times, "Time of a step"), (memory, "Peak memory")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("size ÷ smallest size")
        panel.set_ylabel("÷ that of the smallest size")
        panel.set_title(title, loc="left")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases
