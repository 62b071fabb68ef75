"""Constants that a file writes as nodes."""

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import AttributeProto

from kfac_engine._types import Array
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.passes.order import describe
from kfac_engine.graph.tensors import filled, to_array

# The forms of a Constant node, by the attribute that holds the value.
_FORMS: Mapping[str, Callable[[AttributeProto], Array]] = {
    "value": lambda entry: to_array(entry.t),
    "value_float": lambda entry: np.asarray(entry.f, np.float32),
    "value_floats": lambda entry: np.asarray(entry.floats, np.float32),
    "value_int": lambda entry: np.asarray(entry.i, np.int64),
    "value_ints": lambda entry: np.asarray(entry.ints, np.int64),
    "value_string": lambda entry: np.asarray(entry.s.decode(), object),
    "value_strings": lambda entry: np.asarray([text.decode() for text in entry.strings], object),
}


def lift_constants(graph: onnx.GraphProto, constants: dict[str, Array]) -> frozenset[str]:
    """Move ``Constant`` nodes, and ``ConstantOfShape`` nodes of known shape, into ``constants``.

    Args:
        graph: Its nodes are in topological order; loses those that became constants.
        constants: Value names to arrays; grows.

    Returns:
        Names of those that are filled with one number: the file does not store them.

    Raises:
        UnsupportedError: A constant is not a dense tensor.
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
    # Nodes deleted one by one would each move those behind them.
    if len(nodes) < len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    return frozenset(filled_ones)


def constant_value(node: onnx.NodeProto, constants: Mapping[str, Array]) -> Array | None:
    """What ``node`` makes if it is a constant spelled as a node.

    Args:
        node: Any node, well-formed or not.
        constants: Value names to arrays, for the shape operand of ``ConstantOfShape``.

    Returns:
        The array; None for all other nodes.

    Raises:
        UnsupportedError: The constant is not a dense tensor.
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
        raise UnsupportedError(f"the {describe(node)} holds no dense tensor, so it cannot be used.")
    return _FORMS[form.name](form)
