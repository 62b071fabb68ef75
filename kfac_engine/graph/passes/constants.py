"""Moves constants that a file writes as nodes to the constants of the graph."""

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import AttributeProto

from kfac_engine._types import Array
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.passes.order import describe
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
