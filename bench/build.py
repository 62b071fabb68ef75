"""Time until a model is ready, and its growth with the number of nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from kfac_engine._types import Array
from kfac_engine.bench.environment import answer_of
from kfac_engine.bench.networks import NETWORKS
from kfac_engine.bench.report import Form, Spread, print_table, spread, spread_cells
from kfac_engine.bench.resource_usage import used
from kfac_engine.bench.scaling import Point, Steps, fitted_points, growth
from kfac_engine.bench.step_networks import classifier
from kfac_engine.engine.engine import Engine
from kfac_engine.graph.load import load_model
from kfac_engine.graph.structure import Input
from kfac_engine.runtime.model import OnnxModel

_ROUNDS = 3
# Length of the open axes of a network, except for the batch.
_LENGTH = 16
# Numbers of nodes of the chains, and features of their layers.
SIZES = (1_000, 3_000, 10_000, 100_000)
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """Wall times of one stage between the bytes of a file and the first gradient."""

    network: str
    stage: str
    seconds: Spread


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [row["network"], row["stage"], *spread_cells(row["seconds"])]


FORM = Form(("network", "stage"), ("ms", "quartiles"), _cells)


def run_build(console: Console, name: str) -> list[Stage | Point]:
    """Time the construction of engines for two networks and long chains, and print two tables."""
    stages = [stage for network, make in NETWORKS.items() for stage in measure_build(network, make)]
    FORM.show(console, f"Suite {name}", stages)
    return [*stages, *run_nodes(console, name)]


def measure_build(network: str, make: Callable[[], bytes], rounds: int = _ROUNDS) -> list[Stage]:
    """Return the times of one network by stage; the first two are parts of the third.

    ``make`` returns the bytes of its file, whose output has logits of classes.
    """
    data = make()
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for stage, seconds in _stages(data).items():
            times.setdefault(stage, []).append(seconds)
    return [Stage(network, stage, spread(seconds)) for stage, seconds in times.items()]


def _stages(data: bytes) -> dict[str, float]:
    times = [perf_counter()]
    loaded = load_model(data)
    times.append(perf_counter())
    model = OnnxModel(loaded)
    times.append(perf_counter())
    engine = Engine.from_onnx(data, loss="categorical")
    times.append(perf_counter())
    inputs = {entry.name: _example(entry) for entry in model.graph.inputs}
    targets = np.zeros(1, np.int64)
    # The first batch builds the sessions, the second only uses them.
    for _ in range(2):
        engine.gradients(inputs, targets)
        times.append(perf_counter())
    read, lower, build, first, second = np.diff(times).tolist()
    return {
        "read the file": read,
        "rewrite, sample run": lower,
        "engine, all of it": build,
        "sessions": max(first - second, 0.0),
    }


def _example(entry: Input) -> Array:
    """Return one example filled with ones."""
    shape = (size if isinstance(size, int) else _LENGTH for size in (entry.shape or ())[1:])
    return np.ones((1, *shape), entry.dtype)


def run_nodes(console: Console, name: str, sizes: Sequence[int] = SIZES) -> list[Point]:
    """Build engines for graphs of growing size, and print a table with the exponents."""
    builds = [Steps(**answer_of("build", "build_chain", size, threads=1)) for size in sizes]
    points: list[Point] = fitted_points("nodes, CPU time", sizes, builds, time=1, memory=1)
    heads = ("nodes",), ("CPU seconds", "µs a node", "peak MB", "time grows as", "memory as")
    title = f"Suite {name}, chains of dense layers"
    print_table(console, title, heads, [_node_cells(point) for point in points])
    return points


def _node_cells(point: Point) -> tuple[str, ...]:
    seconds = point.seconds.median
    return (
        str(point.size), f"{seconds:.2f}", f"{1e6 * seconds / point.size:.0f}",
        f"{point.peak_bytes / 1e6:.0f}", growth(point.exponent, point.expected),
        growth(point.memory_exponent, point.memory_expected),
    )  # fmt: skip


def build_chain(nodes: int) -> Steps:
    """Build one engine in this process, after a small one that loads all modules.

    Half of the nodes are dense layers.
    """
    small, large = (classifier((_WIDTH,) * (count // 2 + 1)).data for count in (4, nodes))
    Engine.from_onnx(small, loss="categorical", threads=1)
    usage = used(lambda: Engine.from_onnx(large, loss="categorical", threads=1))
    return Steps(usage.cpu_times, usage.peak_bytes)
