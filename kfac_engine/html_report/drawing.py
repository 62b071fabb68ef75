"""Drawings of charts as SVG, whose colours the style of the page chooses for light and dark."""

from collections.abc import Callable
from html import escape
from itertools import accumulate
from math import ceil, floor, log10

from kfac_engine.html_report.charts import Chart, Series

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
    px, x_ticks = scale(min(xs), max(xs), _LEFT, _RIGHT)
    py, y_ticks = scale(min(ys), max(ys), _BOTTOM, _TOP, logarithmic=logarithmic)
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


def scale(
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
    if style in {"stems", "ticks"}:
        ends = f"{_BOTTOM}V{{y:.1f}}" if style == "stems" else "{y:.1f}m0 -3v6"
        stems = "".join(f"M{x:.1f} {ends.format(y=y)}" for x, y in known)
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
