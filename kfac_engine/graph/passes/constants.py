"""Moves constants that a file writes as nodes to the constants of the graph; separates shared ones.

Exporters write equal constants once. In an untrained normalization, scale and running variance are
ones, and shift and running mean are zeros. One array may then be a weight and a statistic, or the
statistic of several normalizations. Training must change them separately, so the statistic becomes
a second constant.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
from onnx import AttributeProto

from kfac_engine._types import Array
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.passes.order import claim, describe
from kfac_engine.graph.tensors import densified, filled, to_array

# Readers of the value of a Constant node, by the name of its attribute.
_FORMS: Mapping[str, Callable[[AttributeProto], Array]] = {
    "value": lambda entry: to_array(entry.t),
    "sparse_value": lambda entry: densified(entry.sparse_tensor),
    "value_float": lambda entry: np.asarray(entry.f, np.float32),
    "value_floats": lambda entry: np.asarray(entry.floats, np.float32),
    "value_int": lambda entry: np.asarray(entry.i, np.int64),
    "value_ints": lambda entry: np.asarray(entry.ints, np.int64),
    "value_string": lambda entry: np.asarray(entry.s.decode(), object),
    "value_strings": lambda entry: np.asarray([text.decode() for text in entry.strings], object),
}


def lift_constants(graph: onnx.GraphProto, constants: dict[str, Array]) -> frozenset[str]:
    """Move ``Constant`` nodes, and ``ConstantOfShape`` nodes of known shape, into ``constants``.

    The nodes are in topological order. The result is the names of constants that the file stores as
    a shape and one number.
    """
    nodes, filled_ones = [], set()
    for node in graph.node:
        array = constant_value(node, constants)
        if array is None:
            nodes.append(node)
        else:
            array.flags.writeable = False
            constants[node.output[0]] = array
            if node.op_type == "ConstantOfShape":
                filled_ones.add(node.output[0])
    # The list is replaced at once, because deleting single nodes would take quadratic time.
    if len(nodes) < len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    return frozenset(filled_ones)


def constant_value(node: onnx.NodeProto, constants: Mapping[str, Array]) -> Array | None:
    """Return the value of a node that is a constant; None for all other nodes, even invalid ones.

    ``constants`` has the shape operands of ``ConstantOfShape``. A constant that is not a dense
    tensor raises UnsupportedError.
    """
    if node.domain or len(node.output) != 1 or len(node.attribute) > 1:
        return None
    form = next(iter(node.attribute), None)
    if node.op_type == "ConstantOfShape" and node.input and node.input[0] in constants:
        value = to_array(form.t) if form else None
        return filled(constants[node.input[0]], value, f"the result of the {describe(node)}")
    if node.op_type != "Constant" or form is None:
        return None
    if form.name not in _FORMS:
        raise UnsupportedError(
            f"the {describe(node)} contains no dense tensor, so it cannot be used."
        )
    return _FORMS[form.name](form)


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
