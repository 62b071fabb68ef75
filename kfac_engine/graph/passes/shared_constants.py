"""Separates constants that are both a weight and a running statistic.

Exporters write equal constants once. Scale and running variance of an untrained normalization are
ones, shift and running mean are zeros: one array is then a weight and a statistic. Weights are
trained and statistics are not, so the statistic becomes a second constant.
"""

from collections.abc import Iterator

import onnx

from kfac_engine._types import Array

# Operands of BatchNormalization that are statistics.
_STATISTICS = {3: "running_mean", 4: "running_variance"}


def separate_statistics(template: onnx.ModelProto, constants: dict[str, Array]) -> None:
    """Copy each constant that is both a weight and a running statistic, in place.

    Args:
        template: The model without the data of its initializers; receives an initializer for each
            copy.
        constants: Values by name; receives the copies, which share memory with the originals.
    """
    graph = template.graph
    weights = {
        name
        for node in graph.node
        for index, name in enumerate(node.input)
        if not _is_statistic(node, index)
    }
    taken = {*constants, *(name for node in graph.node for name in node.output)}
    new: dict[tuple[str, int], str] = {}
    for node, index in list(_statistics(graph)):
        name = node.input[index]
        if name in constants and name in weights:
            if (name, index) not in new:
                new[name, index] = free = _free(f"{name}.{_STATISTICS[index]}", taken)
                taken.add(free)
                constants[free] = constants[name]
                _declare(graph, name, free)
            node.input[index] = new[name, index]


def _is_statistic(node: onnx.NodeProto, index: int) -> bool:
    return node.op_type == "BatchNormalization" and not node.domain and index in _STATISTICS


def _statistics(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, int]]:
    for node in graph.node:
        for index in range(len(node.input)):
            if _is_statistic(node, index):
                yield node, index


def _declare(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Declare ``new`` with the type of ``old``, as initializer and as input where ``old`` is."""
    for entries in (graph.initializer, graph.input):
        entry = next((entry for entry in entries if entry.name == old), None)
        if entry is not None:
            entries.add().CopyFrom(entry)
            entries[-1].name = new


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
