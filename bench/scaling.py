"""How cost grows: each axis is varied alone, and the exponent of time and memory is fitted.

    python -m kfac_engine.bench.scaling '{"batch": 1024}' 2 5

takes the steps of one shape (fields of ``Shape``) with so many threads, so often. Each shape has a
process of its own, whose memory is not at hand from the one before.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from kfac_engine.bench.environment import environment, keep_to_cores
from kfac_engine.bench.report import new_table
from kfac_engine.bench.resource_usage import used
from kfac_engine.bench.scaling_fit import fitted, growth
from kfac_engine.bench.step_networks import Network, classifier, filters
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.profiling import forget_peak, peak_bytes, resident_bytes
from kfac_engine.errors import BackendError
from kfac_engine.registry import Registry

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A network and its batch.

    Attributes:
        batch: Examples.
        width: Features of every layer, or channels.
        classes: Of the prediction.
        layers: Between input and prediction.
        side: Of images that go through convolutions; 0 for vectors that go through dense layers.
        refresh_every: Steps between inverses.
        mode: Of the estimation.
        trained: Patterns of the parameters that are trained; all if empty.
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
        """The network."""
        if self.side:
            return filters(self.width, self.layers, self.side, self.classes)
        return classifier((self.width,) * (self.layers + 1) + (self.classes,))


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that is varied.

    Attributes:
        sizes: Its values.
        shape: The shape with one of them, the rest so that it dominates.
        time: Exponent that the time is to grow with at most.
        memory: Exponent that the memory is to grow with at most.
    """

    sizes: Sequence[int]
    shape: Callable[[int], Shape]
    time: float
    memory: float


@dataclass(frozen=True, slots=True)
class Steps:
    """What steps of one shape took.

    Attributes:
        times: Wall time of each but the first.
        peak_bytes: Of model and first step, beyond what the process held before.
    """

    times: Sequence[float]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """What one step of one shape took.

    Attributes:
        axis: What was varied.
        size: Its value.
        seconds: Wall times; CPU times of builds.
        peak_bytes: As in ``Steps``.
        exponent: Of time along the whole axis, by least squares of logarithms.
        memory_exponent: Of memory, likewise.
        expected: What the first should not exceed.
        memory_expected: What the second should not exceed.
    """

    axis: str
    size: int
    seconds: Spread
    peak_bytes: int
    exponent: float
    memory_exponent: float
    expected: float
    memory_expected: float


def _classes(count: int) -> Shape:
    # The factor of the last layer has that side by definition: only the first layer is trained.
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
        # As many ways back as classes, each through a last layer with as many columns.
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
        console: Where to print.
        name: Of the suite.
        threads: Of the engine.
        axes: Which.
        rounds: How often each step is timed.

    Returns:
        The points.
    """
    points = [point for axis in axes for point in along(axis, threads, rounds)]
    table = new_table(
        name, ("axis",), ("size", "ms", "quartiles", "peak MB", "time grows as", "memory as")
    )
    for point in points:
        times = point.seconds
        table.add_row(
            point.axis, str(point.size), f"{1e3 * times.median:.1f}",
            f"{1e3 * times.low:.1f} – {1e3 * times.high:.1f}", f"{point.peak_bytes / 1e6:.0f}",
            growth(point.exponent, point.expected),
            growth(point.memory_exponent, point.memory_expected),
        )  # fmt: skip
    console.print(table)
    return points


def along(axis: str, threads: int, rounds: int) -> list[Point]:
    """The points of one axis."""
    varied = AXES[axis]
    found = [_in_new_process(varied.shape(size), threads, rounds) for size in varied.sizes]
    return fitted_points(axis, varied.sizes, found, varied.time, varied.memory)


def fitted_points(
    axis: str, sizes: Sequence[int], found: Sequence[Steps], time: float, memory: float
) -> list[Point]:
    """Measurements with the exponents of their growth.

    Args:
        axis: Its name.
        sizes: Its values.
        found: The measurement at each.
        time: Exponent that the time is to grow with at most.
        memory: Exponent that the memory is to grow with at most.

    Returns:
        A point for each size.
    """
    times = [spread(steps.times) for steps in found]
    peaks = [steps.peak_bytes for steps in found]
    exponent = fitted(sizes, [seconds.median for seconds in times])
    # A peak of nothing, where the system tells none, counts as one byte.
    memory_exponent = fitted(sizes, [max(1, peak) for peak in peaks])
    return [
        Point(axis, size, seconds, peak, exponent, memory_exponent, time, memory)
        for size, seconds, peak in zip(sizes, times, peaks, strict=True)
    ]


def _in_new_process(shape: Shape, threads: int, rounds: int) -> Steps:
    """What ``take_steps`` finds.

    Raises:
        BackendError: The process failed.
    """
    arguments = json.dumps(asdict(shape)), str(threads), str(rounds)
    command = [sys.executable, "-m", "kfac_engine.bench.scaling", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(threads)
    )
    if done.returncode:
        raise BackendError(f"steps of {shape} failed: {done.stderr.strip()}")
    return Steps(**json.loads(done.stdout))


def take_steps(shape: Shape, threads: int, rounds: int) -> Steps:
    """Steps of one shape in this process, after a first one that makes everything.

    Args:
        shape: The shape.
        threads: Of the engine.
        rounds: How many steps.

    Returns:
        What they took.
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
