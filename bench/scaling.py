"""Growth of time and memory: each axis varies alone, and exponents are fitted.

Each shape has a process of its own, without memory from an earlier shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kfac_engine.bench.environment import answer_of
from kfac_engine.bench.report import Form, Spread, spread, spread_cells
from kfac_engine.bench.resource_usage import used
from kfac_engine.bench.step_networks import Network, classifier, filters
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes
from kfac_engine.registry import Registry

_ROUNDS = 5
# Tolerance of an exponent, which is fitted over a few sizes, and the mark of a larger one.
MARGIN, _MARK = 0.15, " !"


@dataclass(frozen=True, slots=True)
class Shape:
    """A network and its batch.

    The layers lie between input and prediction. ``side`` is the height and width of images for
    convolutions; 0 for dense layers. ``trained`` has patterns of parameters; empty for all.
    """

    batch: int = 512
    width: int = 256
    classes: int = 10
    layers: int = 2
    side: int = 0
    refresh_every: int = 1000
    mode: str = "gradients"
    trained: tuple[str, ...] = ()

    def network(self) -> Network:
        """Return the network."""
        if self.side:
            return filters(self.width, self.layers, self.side, self.classes)
        return classifier((self.width,) * (self.layers + 1) + (self.classes,))


@dataclass(frozen=True, slots=True)
class Axis:
    """A size that varies, and the largest expected exponents of time and memory.

    ``shape`` returns the shape for a value, with the other sizes small enough not to matter.
    """

    sizes: Sequence[int]
    shape: Callable[[int], Shape]
    time: float
    memory: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Wall times of the steps of one shape after the first, and the memory up to it."""

    times: Sequence[float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """Resources of one size, with the exponents of its axis and their largest expected values.

    Times are wall times, or CPU times of builds. Exponents are least squares of logarithms.
    """

    axis: str
    size: int
    seconds: Spread
    peak_bytes: int
    exponent: float
    memory_exponent: float
    expected: float
    memory_expected: float


def fitted(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def growth(exponent: float, expected: float) -> str:
    """Return an exponent and the expected bound as text, marked if the bound is exceeded."""
    return f"size^{exponent:.2f}, at most {expected:g}{_MARK * (exponent > expected + MARGIN)}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["axis"], str(row["size"]), *spread_cells(row["seconds"]),
        f"{row['peak_bytes'] / 1e6:.0f}",
        growth(row["exponent"], row["expected"]),
        growth(row["memory_exponent"], row["memory_expected"]),
    ]  # fmt: skip


FORM = Form(("axis",), ("size", "ms", "quartiles", "peak MB", "time grows as", "memory as"), _cells)


def _classes(count: int) -> Shape:
    # The factor of the last layer has ``count`` rows: only the first layer is trained.
    return Shape(classes=count, batch=64, layers=1, mode="exact", trained=("0.*",))


AXES: Mapping[str, Axis] = Registry(
    "axis",
    {
        "batch": Axis((1024, 2048, 4096, 8192), lambda n: Shape(batch=n), 1, 1),
        "positions": Axis(
            (32**2, 64**2, 128**2), lambda n: Shape(batch=8, width=32, side=round(n**0.5)), 1, 1),
        "layers": Axis((4, 8, 16, 32), lambda n: Shape(layers=n), 1, 1),
        # One backward pass for each class, each through a last layer with as many columns.
        "classes": Axis((64, 256, 1024), _classes, 2, 0),
        "width, statistics": Axis(
            (512, 1024, 2048), lambda n: Shape(width=n, batch=1024, layers=1), 2, 2),
        "width, inverses": Axis(
            (512, 1024, 2048), lambda n: Shape(width=n, batch=8, layers=1, refresh_every=1), 3, 2),
    },
)  # fmt: skip


def run_scaling(
    console: Console,
    name: str,
    threads: int,
    axes: Sequence[str] = tuple(AXES),
    rounds: int = _ROUNDS,
) -> list[Point]:
    """Time steps along each axis, and print a table with the exponents."""
    points = [point for axis in axes for point in along(axis, threads, rounds)]
    FORM.show(console, f"Suite {name}", points)
    return points


def along(axis: str, threads: int, rounds: int) -> list[Point]:
    """Return the points of one axis."""
    varied = AXES[axis]
    measured = [_in_new_process(varied.shape(size), threads, rounds) for size in varied.sizes]
    return fitted_points(axis, varied.sizes, measured, varied.time, varied.memory)


def fitted_points(
    axis: str, sizes: Sequence[int], measured: Sequence[Steps], time: float, memory: float
) -> list[Point]:
    """Return measurements with the exponents of their growth.

    ``time`` and ``memory`` are the largest expected exponents.
    """
    times = [spread(steps.times) for steps in measured]
    peaks = [steps.peak_bytes for steps in measured]
    exponent = fitted(sizes, [seconds.median for seconds in times])
    # A peak of 0, for an unknown one, counts as one byte.
    memory_exponent = fitted(sizes, [max(1, peak) for peak in peaks])
    return [
        Point(axis, size, seconds, peak, exponent, memory_exponent, time, memory)
        for size, seconds, peak in zip(sizes, times, peaks, strict=True)
    ]


def _in_new_process(shape: Shape, threads: int, rounds: int) -> Steps:
    """Return the result of ``take_steps`` in a new process."""
    arguments = asdict(shape), threads, rounds
    return Steps(**answer_of("scaling", "take_steps", *arguments, threads=threads))


def take_steps(fields: Mapping[str, Any], threads: int, rounds: int) -> Steps:
    """Time steps of a ``Shape`` in this process, after a first step that builds everything."""
    shape = Shape(**fields)
    net = shape.network()
    inputs, targets = net.inputs(shape.batch), net.targets(shape.batch)
    before = resident_bytes()
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode=shape.mode, threads=threads,
        schedule=Schedule(1, shape.refresh_every), trainable=shape.trained or None,
        approximations={"fully_connected": "kron"},  # factors as wide as the layers
    )  # fmt: skip
    forget_peak()
    engine.step(inputs, targets)
    peak = max(0, peak_bytes() - before)
    usage = used(lambda: engine.step(inputs, targets), rounds)
    return Steps(usage.times, peak)
