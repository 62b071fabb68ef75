"""Growth of time and memory: each axis varies alone, and exponents are fitted.

    python -m kfac_engine.bench.scaling '{"batch": 1024}' 2 5

times 5 steps of one shape (fields of ``Shape``) with 2 threads. Each shape has a process of its
own, without memory from an earlier shape.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kfac_engine.bench.environment import answer_of, keep_to_cores
from kfac_engine.bench.report import Form, spread_cells
from kfac_engine.bench.resource_usage import used
from kfac_engine.bench.scaling_fit import fitted, growth
from kfac_engine.bench.step_networks import Network, classifier, filters
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes
from kfac_engine.registry import Registry

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A network and its batch.

    Attributes:
        batch: Number of examples.
        width: Features or channels of every layer.
        classes: Number of classes.
        layers: Number of layers between input and prediction.
        side: Height and width of images in pixels, for convolutions; 0 for dense layers.
        refresh_every: Steps between refreshes of inverses.
        mode: Estimation mode.
        trained: Patterns of the trainable parameters; empty for all.
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
    """A size that varies.

    Attributes:
        sizes: Values of the size.
        shape: Return the shape for a value, with the other sizes small enough not to matter.
        time: Largest expected exponent of the time.
        memory: Largest expected exponent of the memory.
    """

    sizes: Sequence[int]
    shape: Callable[[int], Shape]
    time: float
    memory: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Resources of the steps of one shape.

    Attributes:
        times: Wall times of all steps but the first.
        peak_bytes: Largest increase of the memory by the model and the first step.
    """

    times: Sequence[float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """Resources of one size, with the exponents of its axis.

    Attributes:
        axis: Name of the axis.
        size: Value on the axis.
        seconds: Wall times; CPU times of builds.
        peak_bytes: As in ``Steps``.
        exponent: Exponent of the time along the axis, by least squares of logarithms.
        memory_exponent: Exponent of the memory, likewise.
        expected: Largest expected exponent of the time.
        memory_expected: Largest expected exponent of the memory.
    """

    axis: str
    size: int
    seconds: Spread
    peak_bytes: int
    exponent: float
    memory_exponent: float
    expected: float
    memory_expected: float


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
            (32**2, 64**2, 128**2),
            lambda n: Shape(batch=8, width=32, side=round(n**0.5)), 1, 1,
        ),
        "layers": Axis((4, 8, 16, 32), lambda n: Shape(layers=n), 1, 1),
        # One backward pass for each class, each through a last layer with as many columns.
        "classes": Axis((64, 256, 1024), _classes, 2, 0),
        "width, statistics": Axis(
            (512, 1024, 2048), lambda n: Shape(width=n, batch=1024, layers=1), 2, 2
        ),
        "width, inverses": Axis(
            (512, 1024, 2048), lambda n: Shape(width=n, batch=8, layers=1, refresh_every=1), 3, 2
        ),
    },
)  # fmt: skip


def run_scaling(
    console: Console,
    name: str,
    threads: int,
    axes: Sequence[str] = tuple(AXES),
    rounds: int = _ROUNDS,
) -> list[Point]:
    """Time steps along each axis, and print a table with the exponents.

    Args:
        console: Console to print on.
        name: Name of the suite.
        threads: Number of threads of the engine.
        axes: Names of axes.
        rounds: Number of timed steps.

    Returns:
        The points.
    """
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

    Args:
        axis: Name of the axis.
        sizes: Values on the axis.
        measured: Measurement of each value.
        time: Largest expected exponent of the time.
        memory: Largest expected exponent of the memory.

    Returns:
        A point for each size.
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
    text = json.dumps(asdict(shape))
    return Steps(**answer_of("scaling", text, threads, rounds, threads=threads))


def take_steps(shape: Shape, threads: int, rounds: int) -> Steps:
    """Time steps of one shape in this process, after a first step that builds everything.

    Args:
        shape: The shape.
        threads: Number of threads of the engine.
        rounds: Number of steps.

    Returns:
        Resources of the steps.
    """
    net = shape.network()
    inputs, targets = net.inputs(shape.batch), net.targets(shape.batch)
    before = resident_bytes()
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode=shape.mode, threads=threads,
        schedule=Schedule(1, shape.refresh_every), trainable=shape.trained or None,
    )  # fmt: skip
    forget_peak()
    engine.step(inputs, targets)
    peak = max(0, peak_bytes() - before)
    usage = used(lambda: engine.step(inputs, targets), rounds)
    return Steps(usage.times, peak)


if __name__ == "__main__":
    keep_to_cores(int(sys.argv[2]))
    _shape = Shape(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(take_steps(_shape, int(sys.argv[2]), int(sys.argv[3])))))
