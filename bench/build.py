"""Time until a model is ready: reading, rewriting, layer discovery, sessions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from kfac_engine._types import Array
from kfac_engine.bench.networks import NETWORKS
from kfac_engine.bench.nodes import run_nodes
from kfac_engine.bench.report import Form, spread_cells
from kfac_engine.bench.scaling import Point
from kfac_engine.bench.timing import Spread, spread
from kfac_engine.engine.engine import Engine
from kfac_engine.graph.load import load_model
from kfac_engine.graph.structure import Input
from kfac_engine.runtime.model import OnnxModel

_ROUNDS = 3
# Length of the open axes of a network, except for the batch.
_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Stage:
    """Times of one stage between the bytes of a file and the first gradient.

    Attributes:
        network: Name of the network.
        stage: Name of the stage.
        seconds: Wall times.
    """

    network: str
    stage: str
    seconds: Spread


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [row["network"], row["stage"], *spread_cells(row["seconds"])]


FORM = Form(("network", "stage"), ("ms", "quartiles"), _cells)


def run_build(console: Console, name: str) -> list[Stage | Point]:
    """Time the construction of engines for two networks and long chains, and print two tables.

    Args:
        console: Console to print on.
        name: Name of the suite.

    Returns:
        The rows of the tables.
    """
    stages = [stage for network, make in NETWORKS.items() for stage in measure_build(network, make)]
    FORM.show(console, f"Suite {name}", stages)
    return [*stages, *run_nodes(console, name)]


def measure_build(network: str, make: Callable[[], bytes], rounds: int = _ROUNDS) -> list[Stage]:
    """Return the times of one network by stage.

    Args:
        network: Name of the network.
        make: Return the bytes of its file, whose output has logits of classes.
        rounds: Number of engines that are built.

    Returns:
        A row for each stage; the first two are parts of the third.
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
