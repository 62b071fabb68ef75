"""How cost grows: each axis is varied alone, and the exponent of time and memory is fitted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from kfac_engine.bench.report import new_table
from kfac_engine.bench.step_networks import classifier
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.bench.usage import Meter, Usage
from kfac_engine.config import Schedule
from kfac_engine.engine import Engine
from kfac_engine.registry import Registry

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A network of equally wide dense layers and its batch.

    Attributes:
        batch: Examples.
        width: Features of every layer.
        classes: Of the prediction.
        layers: Between input and prediction.
        refresh_every: Steps between inverses.
        mode: Of the estimation.
    """

    batch: int = 512
    width: int = 256
    classes: int = 10
    layers: int = 2
    refresh_every: int = 1000
    mode: str = "gradients"


@dataclass(frozen=True, slots=True)
class Point:
    """What one step of one shape took.

    Attributes:
        axis: What was varied.
        size: Its value.
        seconds: Wall times.
        peak_bytes: Beyond what the process held before.
        exponent: Of time along the whole axis, by least squares of logarithms.
        memory_exponent: Of memory, likewise.
    """

    axis: str
    size: int
    seconds: Spread
    peak_bytes: int
    exponent: float
    memory_exponent: float


# What is varied, at what, and how the rest is set so that it dominates.
AXES: Mapping[str, tuple[Sequence[int], Callable[[int], Shape]]] = Registry(
    "axis",
    {
        "batch": ((1024, 2048, 4096, 8192), lambda n: Shape(batch=n)),
        "layers": ((4, 8, 16, 32), lambda n: Shape(layers=n)),
        "classes": ((64, 256, 1024), lambda n: Shape(classes=n, batch=64, mode="exact", layers=1)),
        "width, statistics": ((512, 1024, 2048), lambda n: Shape(width=n, batch=1024, layers=1)),
        "width, inverses": (
            (512, 1024, 2048), lambda n: Shape(width=n, batch=8, layers=1, refresh_every=1),
        ),
    },
)  # fmt: skip


def run_scaling(
    console: Console, name: str, axes: Sequence[str] = tuple(AXES), rounds: int = _ROUNDS
) -> list[Point]:
    """Time steps along each axis, and print a table with the exponents.

    Args:
        console: Where to print.
        name: Of the suite.
        axes: Which.
        rounds: How often each step is timed.

    Returns:
        The points.
    """
    points = [point for axis in axes for point in along(axis, rounds)]
    table = new_table(
        name, ("axis",), ("size", "ms", "quartiles", "peak MB", "time grows as", "memory as")
    )
    for point in points:
        times = point.seconds
        table.add_row(
            point.axis, str(point.size), f"{1e3 * times.median:.1f}",
            f"{1e3 * times.low:.1f} – {1e3 * times.high:.1f}", f"{point.peak_bytes / 1e6:.0f}",
            f"size^{point.exponent:.2f}", f"size^{point.memory_exponent:.2f}",
        )  # fmt: skip
    console.print(table)
    return points


def along(axis: str, rounds: int) -> list[Point]:
    """The points of one axis."""
    sizes, shape = AXES[axis]
    found = {size: _steps(shape(size), rounds) for size in sizes}
    times = {size: spread([u.seconds for u in usages]) for size, usages in found.items()}
    peaks = {size: max(u.peak_bytes for u in usages) for size, usages in found.items()}
    exponent = fitted(sizes, [times[size].median for size in sizes])
    # A peak of nothing, where the system tells none or memory was at hand, counts as one byte.
    memory = fitted(sizes, [max(1, peaks[size]) for size in sizes])
    return [Point(axis, size, times[size], peaks[size], exponent, memory) for size in sizes]


def fitted(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Slope of the line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _steps(shape: Shape, rounds: int) -> list[Usage]:
    net = classifier((shape.width,) * (shape.layers + 1) + (shape.classes,))
    inputs, targets = net.inputs(shape.batch), net.targets(shape.batch)
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode=shape.mode,
        schedule=Schedule(1, shape.refresh_every),
    )  # fmt: skip
    engine.step(inputs, targets)
    usages = []
    for _ in range(rounds):
        meter = Meter()
        engine.step(inputs, targets)
        usages.append(meter.usage())
    return usages
