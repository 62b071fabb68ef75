"""Growth of the time and memory of a build with the number of nodes; a process for each size.

    python -m kfac_engine.bench.nodes 100000

builds an engine for a graph of 100,000 nodes, and prints CPU seconds and bytes.
"""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from kfac_engine.bench.environment import answer_of, keep_to_cores
from kfac_engine.bench.report import print_table
from kfac_engine.bench.resource_usage import used
from kfac_engine.bench.scaling import Point, Steps, fitted_points
from kfac_engine.bench.scaling_fit import growth
from kfac_engine.bench.step_networks import classifier
from kfac_engine.engine.engine import Engine

SIZES = (1_000, 3_000, 10_000, 100_000)
_WIDTH = 4


def run_nodes(console: Console, name: str, sizes: Sequence[int] = SIZES) -> list[Point]:
    """Build engines for graphs of growing size, and print a table with the exponents.

    Args:
        console: Console to print on.
        name: Name of the suite.
        sizes: Numbers of nodes.

    Returns:
        A point for each size.
    """
    builds = [Steps(*answer_of("nodes", size, threads=1)) for size in sizes]
    points: list[Point] = fitted_points("nodes, CPU time", sizes, builds, time=1, memory=1)
    heads = ("nodes",), ("CPU seconds", "µs a node", "peak MB", "time grows as", "memory as")
    title = f"Suite {name}, chains of dense layers"
    print_table(console, title, heads, [_cells(point) for point in points])
    return points


def _cells(point: Point) -> tuple[str, ...]:
    seconds = point.seconds.median
    return (
        str(point.size), f"{seconds:.2f}", f"{1e6 * seconds / point.size:.0f}",
        f"{point.peak_bytes / 1e6:.0f}", growth(point.exponent, point.expected),
        growth(point.memory_exponent, point.memory_expected),
    )  # fmt: skip


def build(nodes: int) -> Steps:
    """Build one engine in this process, after a small one that loads all modules.

    Args:
        nodes: Number of nodes of the graph; half of them are dense layers.

    Returns:
        CPU seconds, and the largest increase of the memory.
    """
    small, large = (classifier((_WIDTH,) * (count // 2 + 1)).data for count in (4, nodes))
    Engine.from_onnx(small, loss="categorical", threads=1)
    usage = used(lambda: Engine.from_onnx(large, loss="categorical", threads=1))
    return Steps(usage.cpu_times, usage.peak_bytes)


if __name__ == "__main__":
    keep_to_cores(1)
    _built = build(int(sys.argv[1]))
    print(json.dumps((_built.times, _built.peak_bytes)))
