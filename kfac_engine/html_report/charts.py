"""Draws the charts of a run as SVG, with a bounded number of points."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, pairwise
from math import ceil, floor, log10
from typing import Any, Literal, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.html_report.run_log import RunLog, finite_or_none
from kfac_engine.printable import printable
from kfac_engine.training.history import STEP_ENTRIES

Style: TypeAlias = Literal["line", "faint", "marks", "stems", "areas"]

MOST_POINTS = 1000
MOST_RANGES = 120
_MOST_MEANS = 60
VALIDATION = "validation_loss"
STAGE = "seconds/"
OTHER = "other"
# The stages that a run without curvature does not have.
CURVATURE_STAGES = ("statistics", "inverses", "precondition", "damping")
_MILLISECONDS = 1000.0
# An axis is logarithmic if its largest value is so many times the smallest.
_LOGARITHMIC_FROM = 30.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str  # name in the legend
    # ``"line"``, ``"faint"`` (a noisy line behind others), ``"marks"``, ``"stems"`` or ``"areas"``
    # (on top of each other; a value lasts from the position before to its own).
    style: Style
    step: Sequence[float]  # steps or other positions, ascending
    seconds: Sequence[float | None]  # seconds of these steps; None where they are unknown
    value: Sequence[float | None]  # values; None where they are undefined


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines against steps or seconds."""

    title: str
    note: str  # a sentence on how to read the chart
    unit: str  # unit of the values
    logarithmic: bool  # whether the axis of the values is logarithmic
    series: list[Series]  # the lines
    # Horizontal lines: values with their names.
    references: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stages:
    """The time of a run by stage."""

    totals: dict[str, float]  # seconds of each stage, by name
    chart: Chart  # mean milliseconds of a step, over ranges of steps


def charts(log: RunLog) -> list[Chart]:
    """Return the charts of a run; numbers that no record has are left out."""
    drawn = (_loss(log), *_metrics(log), *_numbers(log), _costs(log))
    return [chart for chart in drawn if chart is not None]


def constants(log: RunLog) -> dict[str, float]:
    """Return the numbers that are equal in all steps and have no chart, by title."""
    return {
        title: float(log.columns[name][0])
        for name, (title, _, _) in _NUMBERS.items()
        if name in log.columns and (log.columns[name] == log.columns[name][0]).all()
    }


def stage_times(log: RunLog) -> Stages | None:
    """Return the time of the stages; None if the records have no stages.

    The stage ``"other"`` is the time between two steps, such as validation and reading of data.
    """
    names = [name for name in log.columns if name.startswith(STAGE)]
    if not names:
        return None
    columns = {name.removeprefix(STAGE): np.nan_to_num(log.columns[name]) for name in names}
    durations = np.diff(log.columns["seconds"], prepend=0.0)
    if np.isfinite(durations).all():
        columns[OTHER] = (durations - sum(columns.values())).clip(min=0)
    parts = ranges(log.steps, MOST_RANGES)
    ends = np.array([end - 1 for _, end in parts])
    step, seconds = (log.columns[name][ends] for name in ("step", "seconds"))
    lines = [
        Series(
            printable(name), "areas", step.tolist(), _finites(seconds),
            _finites(_MILLISECONDS * means(column, parts)),
        )
        for name, column in columns.items()
    ]  # fmt: skip
    note = (
        f"Mean time of a step over {len(parts)} ranges of steps. The stage “other” is the time "
        f"between two steps, such as validation and reading of data."
    )
    return Stages(
        {printable(name): float(column.sum()) for name, column in columns.items()},
        Chart("Time of a step by stage", note, "ms", False, lines),
    )


def series(log: RunLog, name: str, values: Array, style: Style) -> Series:
    """Return a line through the defined values of a column, with at most 1000 points."""
    defined = np.flatnonzero(np.isfinite(values))
    chosen = defined[extremes(values[defined], MOST_POINTS)] if len(defined) else defined
    return _points(log, name, values, chosen, style)


def _points(log: RunLog, name: str, values: Array, chosen: Array, style: Style) -> Series:
    return Series(
        printable(name),
        style,
        [int(step) for step in log.columns["step"][chosen]],
        _finites(log.columns["seconds"][chosen]),
        _finites(values[chosen]),
    )


def _loss(log: RunLog) -> Chart | None:
    """Return the chart of the losses of batches, their means over steps, and validation losses."""
    if "loss" not in log.columns:
        return None
    loss, lines = log.columns["loss"], []
    parts = ranges(log.steps, _MOST_MEANS)
    is_averaged = log.steps >= 2 * _MOST_MEANS
    lines.append(series(log, "batch", loss, "faint" if is_averaged else "line"))
    if is_averaged:
        averages, ends = means(loss, parts), np.array([end - 1 for _, end in parts])
        steps = round(log.steps / len(parts))
        spread = np.full(log.steps, np.nan)
        spread[ends] = averages
        lines.append(_points(log, f"mean of about {steps} steps", spread, ends, "line"))
    if VALIDATION in log.columns:
        lines.append(series(log, "validation", log.columns[VALIDATION], "marks"))
    note = "Loss of each batch before its update, and of the validation data."
    return _chart("Loss", note, "", lines)


# Title, note and unit of the chart of a column of the log, and the lines to compare with.
_NUMBERS: dict[str, tuple[str, str, list[tuple[float, str]]]] = {
    "learning_rate": ("Learning rate", "Learning rate of each step, times the schedule.", []),
    "momentum": ("Momentum", "Momentum of each step.", []),
    "damping": ("Damping", "Damping λ of each step.", []),
    "reduction_ratio": (
        "Reduction ratio",
        "Change of the loss divided by the change that the quadratic model predicts. The damping "
        "falls above 0.75 and rises below 0.25.",
        [(0.25, "0.25"), (0.75, "0.75")],
    ),
}


def _numbers(log: RunLog) -> Iterator[Chart]:
    for name, (title, note, references) in _NUMBERS.items():
        if np.isfinite(log.columns.get(name, np.empty(0))).any() and title not in constants(log):
            style: Style = "marks" if references else "line"
            lines = [series(log, title.lower(), log.columns[name], style)]
            yield _chart(title, note, "", lines, references)


def _costs(log: RunLog) -> Chart | None:
    """Return the chart of the steps that updated statistics or inverses, with their times."""
    lines = []
    for stage, name in (("statistics", "statistics"), ("inverses", "inverses")):
        column = log.columns.get(f"{STAGE}{stage}")
        if column is not None:
            events = _MILLISECONDS * np.where(column > 0, column, np.nan)
            lines.append(series(log, name, events, "stems"))
    if not lines:
        return None
    note = "Each stem is a step that updated the statistics or refreshed the inverses."
    return _chart("Updates of the curvature", note, "ms", lines)


def _metrics(log: RunLog) -> Iterator[Chart]:
    """Yield a chart for each other number of the records."""
    shown = {*STEP_ENTRIES, VALIDATION}
    for name, column in log.columns.items():
        if name not in shown and not name.startswith(STAGE) and np.isfinite(column).any():
            label = printable(name)
            line = series(log, label, column, "marks")
            yield _chart(label, "At the steps whose records have this number.", "", [line])


def _chart(
    title: str,
    note: str,
    unit: str,
    lines: Sequence[Series],
    references: Sequence[tuple[float, str]] = (),
) -> Chart:
    values = [value for line in lines for value in line.value if value is not None]
    smallest, largest = min(values, default=0.0), max(values, default=0.0)
    logarithmic = smallest > 0 and largest > _LOGARITHMIC_FROM * smallest
    return Chart(title, note, unit, logarithmic, list(lines), list(references))


def _finites(values: Array) -> list[Any]:
    return [finite_or_none(value) for value in values]


def extremes(values: Array, most: int) -> Array:
    """Return the ascending indices of the extremes of ranges, at most ``most`` indices.

    The values are ``(n,)``, and ``most`` is at least 4. If there are at most ``most`` values, the
    result has all indices. Otherwise the ranges have equal sizes, and the first, the last, the
    smallest and the largest value are among the results. Ranges of NaN have one index.
    """
    n = len(values)
    if n <= most:
        return np.arange(n)
    chosen = {0, n - 1}
    for start, end in ranges(n, (most - 2) // 2):
        part = values[start:end]
        if np.isnan(part).all():
            chosen.add(start)
        else:
            chosen |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def ranges(n: int, most: int) -> list[tuple[int, int]]:
    """Divide ``n`` entries into at most ``most`` ranges ``(start, end)`` of nearly equal size."""
    edges = np.linspace(0, n, min(n, most) + 1).astype(int).tolist()
    return list(pairwise(edges))


def means(values: Array, parts: list[tuple[int, int]]) -> Array:
    """Return the mean of the finite values in each range; NaN where there is none."""
    finite = (values[start:end][np.isfinite(values[start:end])] for start, end in parts)
    return np.array([part.mean() if part.size else np.nan for part in finite])


_WIDTH, _HEIGHT = 480, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 472, 10, 196
_COLOURS, _MOST_DOTS, _TICKS = 8, 80, 5


def drawing(chart: Chart, axis: str, label: str) -> str:
    """Return an SVG with axes; ``label`` is at the horizontal axis.

    ``axis`` is the attribute of the series of the chart that has their positions.
    """
    title, logarithmic = escape(chart.title), chart.logarithmic
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
    lines = [(getattr(line, axis), line.value, line.style) for line in chart.series]
    if lines and lines[0][2] == "areas":  # one on the other, the highest first
        rows = [[value or 0.0 for value in values] for _, values, _ in lines]
        sums = accumulate(rows, lambda below, row: [a + b for a, b in zip(below, row, strict=True)])
        lines = [(x, top, style) for (x, _, style), top in zip(lines, sums, strict=True)]
    xs = [x for line in lines for x in line[0] if x is not None]
    ys = [y for line in lines for y in line[1] if y is not None and (y > 0 or not logarithmic)]
    if not xs or not ys:
        return f'{head}<text x="20" y="30">no values</text></svg>'
    if not logarithmic and all(style in {"stems", "areas"} for _, _, style in lines):
        ys.append(0.0)
    if lines[0][2] == "areas":  # the first is as wide as the second
        xs.append(2 * xs[0] - xs[1] if len(xs) > 1 else xs[0] - 1)
    ys += [value for value, _ in chart.references]
    px, x_ticks = axis_scale(min(xs), max(xs), _LEFT, _RIGHT)
    py, y_ticks = axis_scale(min(ys), max(ys), _BOTTOM, _TOP, logarithmic=logarithmic)
    parts = [head, _rule(_BOTTOM, "frame"), _text(_RIGHT, _HEIGHT - 4, label)]
    for tick in y_ticks:
        parts += _rule(py(tick), "grid"), _text(_LEFT - 6, py(tick) + 4, f"{tick:.5g}")
    parts += [_text(px(tick), _BOTTOM + 15, f"{tick:.5g}", "middle") for tick in x_ticks]
    parts.append(_text(4, _HEIGHT - 4, chart.unit, "start"))
    for number, (x, y, style) in reversed([*enumerate(lines)]):
        points = [
            None if i is None or j is None or (logarithmic and j <= 0) else (px(i), py(j))
            for i, j in zip(x, y, strict=True)
        ]
        parts += _paths(points, style, number % _COLOURS)
    for value, name in chart.references:
        parts += _rule(py(value), "reference"), _text(_RIGHT, py(value) - 4, name)
    return "".join([*parts, "</svg>"])


def legend(lines: list[Series]) -> str:
    """Return the names of the lines with their colours, if there are several."""
    keys = (
        f'<span class="key"><svg viewBox="0 0 24 12"><path d="M1 6H23" class="'
        f'{"faint" if line.style == "faint" else "line"} s{number % _COLOURS}"/>'
        f"</svg>{escape(line.name)}</span>"
        for number, line in enumerate(lines)
    )
    return f'<div class="tools">{"".join(keys)}</div>' if len(lines) > 1 else ""


def axis_scale(
    low: float, high: float, start: float, end: float, *, logarithmic: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Return a map from values to pixels, and ticks: multiples of 1, 2 or 5 times a power of ten.

    The values ``low`` and ``high`` are at the pixels ``start`` and ``end``; equal values are moved
    apart. If ``logarithmic``, equal distances are equal ratios, and the values are positive.
    """
    size = max(abs(low), abs(high))
    if logarithmic:
        if log10(high) - log10(low) < 1e-12:
            low, high = max(low / 2, 5e-324), high * 2
    elif high - low <= max(size * 1e-10, 1e-300):  # the ticks would be equal
        pad = size if size > 1e-300 else 1.0
        low, high = low - pad / 2, high + pad / 2
    f = log10 if logarithmic else float
    first, length = f(low), f(high) - f(low)

    def place(value: float) -> float:
        return start + (f(value) - first) / length * (end - start)

    ticks = _powers(low, high) if logarithmic else _multiples(low, high)
    return place, ticks


def _multiples(low: float, high: float) -> list[float]:
    rough = (high - low) / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = next((k * power for k in (1, 2, 5, 10) if k * power >= rough), rough)
    first, last = ceil(low / step), floor(high / step * (1 + 1e-12))
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = floor(log10(low)), ceil(log10(high))
    stride = max(1, ceil((last - first) / _TICKS))
    factors = (1, 2, 5) if last - first < 3 else (1,)
    values = (float(f"{k}e{p}") for p in range(first, last + 1, stride) for k in factors)
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _text(x: float, y: float, text: str, anchor: str = "end") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(y: float, kind: str) -> str:
    return f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" class="{kind}"/>'


def _paths(points: list[tuple[float, float] | None], style: str, colour: int) -> list[str]:
    """Return the drawing of one line, which an undefined value interrupts."""
    known = [point for point in points if point]
    if style == "areas":
        steps = "".join(f"V{y:.1f}H{x:.2f}" for x, y in known)
        return [f'<path d="M{_LEFT} {_BOTTOM}{steps}V{_BOTTOM}Z" class="f{colour}"/>']
    if style == "stems":
        stems = "".join(f"M{x:.1f} {_BOTTOM}V{y:.1f}" for x, y in known)
        return [f'<path d="{stems}" class="stem s{colour}"/>']
    pairs = zip([None, *points], points, strict=False)
    path = "".join(
        f"{'L' if before else 'M'}{point[0]:.1f} {point[1]:.1f}" for before, point in pairs if point
    )
    kind = "faint" if style == "faint" else "line"
    drawn = [f'<path d="{path}" class="{kind} s{colour}"/>']
    if style == "marks" and len(known) <= _MOST_DOTS:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in known)
        drawn.append(f'<path d="{dots}" class="dots s{colour}"/>')
    return drawn
