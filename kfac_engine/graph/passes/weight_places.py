"""Computes the positions of weight slices from sizes that are equal in every batch.

PyTorch writes the gates of a recurrent weight as slices, whose bounds are multiples of the size of
a hidden state. Shape inference finds this size, so that the bounds are constants.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from kfac_engine._types import Array
from kfac_engine.graph.structure import MOVES

# Sizes and places are numbers in float64, in which NaN is a size that differs between batches.
_UNKNOWN = np.nan
# Arrays of places are small; a file could double one in each node.
_MOST_ENTRIES = 64
# Whole numbers of float64 are exact below this.
_EXACT = 1 << 53


def settle_places(model: onnx.ModelProto, constants: dict[str, Array]) -> None:
    """Replace nodes that compute the bounds of slices of weights by constants, in place.

    The nodes are in topological order, and the small constants are declared. ``constants`` receives
    the bounds.
    """
    graph = model.graph
    places = set(_places(graph, constants)) - {entry.name for entry in graph.output}
    if not places:
        return
    shapes, needed = _shapes(model), set(places)
    for node in reversed(graph.node):
        if node.op_type in _ARITHMETIC and not needed.isdisjoint(node.output):
            needed.update(node.input)
    numbers = {
        name: array.astype(np.float64)
        for name in needed & constants.keys()
        if (array := constants[name]).dtype == np.int64 and array.size <= _MOST_ENTRIES
    }
    for node in graph.node:
        if not needed.isdisjoint(node.output) and not node.domain:
            number = _number(node, numbers, shapes)
            if number is not None and number.size <= _MOST_ENTRIES:
                numbers[node.output[0]] = number
    constants.update(
        (name, numbers[name].astype(np.int64))
        for name in sorted(places & numbers.keys())
        if (np.abs(numbers[name]) < _EXACT).all()  # false for NaN
    )
    others = [node for node in graph.node if constants.keys().isdisjoint(node.output)]
    del graph.node[:]
    graph.node.extend(others)


def _places(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> Iterator[str]:
    """Yield the computed bounds at which weights are sliced."""
    weights = {name for name, array in constants.items() if array.dtype.kind == "f" and array.ndim}
    for node in graph.node:
        if not node.domain and node.op_type in MOVES and node.input[0] in weights:
            weights.update(node.output)
            if node.op_type == "Slice":
                yield from (name for name in node.input[1:] if name and name not in constants)


def _shapes(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the shapes that follow from the inputs, by name."""
    bare = deepcopy(model)
    del bare.graph.value_info[:]  # a file may claim anything there
    inferred = shape_inference.infer_shapes(bare, data_prop=True).graph
    return {
        entry.name: np.array(
            [dim.dim_value or _UNKNOWN for dim in entry.type.tensor_type.shape.dim], np.float64
        )
        for entry in (*inferred.input, *inferred.value_info)
        if entry.type.tensor_type.HasField("shape")
    }


def _number(
    node: onnx.NodeProto, numbers: Mapping[str, Array], shapes: Mapping[str, Array]
) -> Array | None:
    """Return the result of a node; None for one that is not computed."""
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    if node.op_type == "Shape" and node.input[0] in shapes:
        return shapes[node.input[0]][attributes.get("start") : attributes.get("end")]
    operands = [numbers.get(name) for name in node.input]
    if node.op_type not in _ARITHMETIC or any(operand is None for operand in operands):
        return None
    try:
        with np.errstate(all="ignore"):  # a division by zero has no place
            return np.asarray(_ARITHMETIC[node.op_type](*operands, **attributes))
    except (IndexError, TypeError, ValueError):
        return None  # an unknown place, or a node that ONNX Runtime refuses


def _whole(numbers: Array) -> list[int]:
    """Return places as whole numbers; a ValueError if one is unknown."""
    return [int(number) for number in numbers.ravel()]


def _gather(data: Array, places: Array, axis: int = 0) -> Array:
    return data.take(np.reshape(_whole(places), places.shape), axis)


def _slice(
    data: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    (start,), (end,) = _whole(starts), _whole(ends)
    (axis,) = [0] if axes is None else _whole(axes)
    (step,) = [1] if steps is None else _whole(steps)
    if axis not in (0, -data.ndim):
        raise ValueError(axis)
    return data[start:end:step]


def _cast(data: Array, to: int, **_: Any) -> Array:
    if to != onnx.TensorProto.INT64:
        raise TypeError(to)
    return data


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "Add": np.add,
    "Cast": _cast,
    "Concat": lambda *parts, axis: np.concatenate(parts, axis),
    "Div": np.floor_divide,
    "Gather": _gather,
    "Identity": lambda data: data,
    "Max": lambda *parts: np.maximum.reduce(parts),
    "Min": lambda *parts: np.minimum.reduce(parts),
    "Mul": np.multiply,
    "Reshape": lambda data, shape, **_: data.reshape(_whole(shape)),
    "Slice": _slice,
    "Squeeze": lambda data, axes=None: data.squeeze(None if axes is None else tuple(_whole(axes))),
    "Sub": np.subtract,
    "Unsqueeze": lambda data, axes: np.expand_dims(data, tuple(_whole(axes))),
}
