"""Copies running statistics that a file shares with other constants.

Exporters write equal constants once. In an untrained normalization, scale and running variance are
ones, and shift and running mean are zeros. One array may then be a weight and a statistic, or the
statistic of several normalizations. Training must change them separately, so the statistic becomes
a second constant.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from kfac_engine._types import Array
from kfac_engine.graph.passes.order import claim

# Indices of the operands of BatchNormalization that are statistics, with the suffix of a copy.
_STATISTICS = {3: "running_mean", 4: "running_variance"}
_INITIAL = {3: 0, 4: 1}


def separate_statistics(template: onnx.ModelProto, constants: dict[str, Array]) -> None:
    """Copy each constant that is both a weight and a running statistic, in place.

    ``template`` has no data and receives an initializer for each copy; ``constants`` receives the
    copies, which share memory with the originals.
    """
    graph = template.graph
    weights = {
        name
        for node in graph.node
        for index, name in enumerate(node.input)
        if not _is_statistic(node, index)
    }
    used = _used_names(graph, constants)
    new: dict[tuple[str, int], str] = {}
    for node, index in list(_statistics(graph)):
        name = node.input[index]
        if name in constants and name in weights:
            if (name, index) not in new:
                new[name, index] = claim(f"{name}.{_STATISTICS[index]}", used)
                _copy(graph, constants, name, new[name, index])
            node.input[index] = new[name, index]


def separate_normalizations(template: onnx.ModelProto, constants: dict[str, Array]) -> None:
    """Copy each running statistic that several normalizations share unintentionally, in place.

    Normalizations share a statistic intentionally if they share all four operands and the statistic
    has been trained. They are then uses of one normalization. Call ``separate_statistics`` before,
    with the same arguments.
    """
    graph = template.graph
    used = _used_names(graph, constants)
    users: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node, index in _statistics(graph):
        users.setdefault(node.input[index], []).append((node, index))
    for name, readers in users.items():
        if name not in constants or _is_one_normalization(readers, constants[name]):
            continue
        for node, index in readers[1:]:
            node.input[index] = claim(f"{name}.{_STATISTICS[index]}", used)
            _copy(graph, constants, name, node.input[index])


def _is_one_normalization(readers: list[tuple[onnx.NodeProto, int]], value: Array) -> bool:
    operands = {(*node.input[1:5], index) for node, index in readers}
    return len(operands) == 1 and not np.all(value == _INITIAL[readers[0][1]])


def _is_statistic(node: onnx.NodeProto, index: int) -> bool:
    return node.op_type == "BatchNormalization" and not node.domain and index in _STATISTICS


def _statistics(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, int]]:
    for node in graph.node:
        for index in range(len(node.input)):
            if _is_statistic(node, index):
                yield node, index


def _used_names(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> set[str]:
    return {*constants, *(name for node in graph.node for name in node.output)}


def _copy(graph: onnx.GraphProto, constants: dict[str, Array], old: str, new: str) -> None:
    """Add a constant ``new`` with the value of ``old``, declared like ``old``."""
    constants[new] = constants[old]
    for entries in (graph.initializer, graph.input):
        entry = next((entry for entry in entries if entry.name == old), None)
        if entry is not None:
            entries.add().CopyFrom(entry)
            entries[-1].name = new
