"""Finds the layer of a weight, with a table of matchers by operator and operand."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.structure import RELAYS, Fact, Node
from kfac_engine.layers.grouped import grouped_form, stacked_dense_form
from kfac_engine.layers.layer_forms import (
    convolution_form,
    dense_form,
    embedding_form,
    transposed_form,
)
from kfac_engine.layers.match import LayerMatch, MatchContext, NewValue
from kfac_engine.layers.parameter_views import rearrange_entries
from kfac_engine.layers.scales import scale_of_normalization, scale_of_product, slope
from kfac_engine.layers.views import Padding

# -- biases behind a transposition or reshape of the result ----------------------------------------


_MOVED = RELAYS | {"Slice"}


def find_bias_behind_views(
    context: MatchContext, value: str, weight: str, numbers: Array
) -> tuple[str, ...]:
    """Return the bias that is added to the result of a layer after a transposition or reshape.

    ``value`` is the name of the result. ``numbers`` has the index of the feature of each entry, in
    a shape that broadcasts to the result. Without a bias the tuple is empty.
    """
    features: Array = np.broadcast_to(numbers, context.shapes[value])
    user, position = context.only_user(value)
    # Omitted entries have no gradient.
    while user is not None and user.op in _MOVED and position == 0:
        moved = rearrange_entries(features, user, context.graph, context.shapes)
        if not moved:
            return ()
        features = moved[user.outputs[0]]
        user, position = context.only_user(user.outputs[0])
    if user is None or user.op != "Add":
        return ()
    bias = user.inputs[1 - position]
    if not context.goes_with(bias, weight) or context.shapes[user.outputs[0]] != features.shape:
        return ()
    shape, count = context.shapes[bias], numbers.size
    # Each entry of the bias must be added to one feature, in the order of the features.
    fits = prod(shape) == count and np.array_equal(
        np.broadcast_to(np.arange(count).reshape(shape), features.shape), features
    )
    return (bias,) if fits else ()


# -- embedding tables ------------------------------------------------------------------------------
#
# Rows are selected by token ids or by position ids. Position ids depend on the shape of the data
# alone. They and the selected rows are the same for all examples. The output of the layer is the
# sum of these rows and the data; its ids are added to the graph, once for each example.


# Operators between the rows of a table and their sum with the data.
_KEEPS_IDS = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze"})


def match_gather(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match a table whose rows Gather selects; return the reason if there is no layer."""
    table, ids = node.inputs
    if node.attributes.get("axis", 0) != 0 or not context.is_weight(table, 2):
        return f"table of Gather, shape {context.shapes[table]}"
    rows, shape = node.outputs[0], context.shapes[ids]
    if shape and (ids in context.data or (ids in context.loose.data and rows in context.axes)):
        return embedding_match(context, table, ids, rows)
    unknown = "table of Gather whose indices do not depend on the data"
    return (_positions(context, table, ids, rows) if ids in context.loose.data else None) or unknown


def embedding_match(context: MatchContext, table: str, ids: str, rows: str) -> LayerMatch:
    """Return the layer of a table from which ``ids`` select ``rows`` for each example."""
    positions = len(context.shapes[ids]) > 1
    # Gather refuses ids outside the table. OneHot has a row of zeros for them.
    form = embedding_form(context.shapes[table][0], positions=positions, zeros_outside=True)
    return LayerMatch("embedding", (table,), ids, rows, form)


def find_token_ids(context: MatchContext, value: str) -> str:
    """Return the name of the token ids that ``value`` encodes as one-hot rows, or ``""``."""
    node = context.graph.producers.get(context.graph.source(value, {"Cast", "Identity"}))
    if node is None or node.qualified_op != "OneHot":
        return ""
    ids, _, values = node.inputs
    last = node.attributes.get("axis", -1) in (-1, len(context.shapes[ids]))
    off_on = context.graph.constants.get(values)
    fits = last and off_on is not None and off_on.tolist() == [0, 1] and ids in context.data
    fits = fits and context.dtypes[ids].kind in "iu"
    return ids if fits and context.shapes[ids] else ""


def _positions(context: MatchContext, table: str, ids: str, rows: str) -> LayerMatch | None:
    """Return the layer of a position embedding, whose rows are added to the data."""
    value, (user, _) = rows, context.only_user(rows)
    while user is not None and user.op in _KEEPS_IDS and not user.domain:
        value = user.outputs[0]
        user, _ = context.only_user(value)
    if user is None or user.op != "Add":
        return None
    y, ids_shape = user.outputs[0], context.shapes[ids]
    shape, features = context.shapes[y][:-1], context.shapes[table][1]
    # The ids must be broadcast like their rows, with new axes first. A single id cannot prove it.
    aligned = (
        _trailing(context.shapes[value]) == _trailing((*ids_shape, features))
        and prod(ids_shape) > 1
    )
    if y not in context.axes or not aligned or context.shapes[y][-1] != features:
        return None
    broadcast_ids = f"token ids of '{table}' in {y}"
    shape_name = f"{broadcast_ids}: shape"
    last = {"start": 0, "end": -1}
    computed = (
        NewValue(
            Node("Shape", (y,), (shape_name,), last, f"make {shape_name}"),
            {},
            Fact(np.dtype(np.int64), (len(shape),)),
        ),
        NewValue(
            Node("Expand", (ids, shape_name), (broadcast_ids,), {}, f"make {broadcast_ids}"),
            {},
            Fact(context.dtypes[ids], shape),
        ),
    )
    form = embedding_form(context.shapes[table][0], positions=True, zeros_outside=True)
    return LayerMatch("embedding", (table,), broadcast_ids, y, form, computed=computed)


def _trailing(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its leading ones."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


# A matcher returns the layer of a node, or the reason why its weight belongs to none.
Matcher: TypeAlias = Callable[[MatchContext, Node, int], LayerMatch | str]


# -- all layers ------------------------------------------------------------------------------------


def match(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match a parameter that is operand ``index`` of a node to a layer.

    If there is no layer, the result is the reason.
    """
    operand = node.qualified_op, index
    if operand in _MATCHERS:
        return _MATCHERS[operand](context, node, index)
    return f"operand {index} of {node.qualified_op}"


# -- dense -----------------------------------------------------------------------------------------


def _gemm(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    x, weight = node.inputs[0], node.inputs[index]
    if x not in context.data:
        return _frozen_data(node, index)
    if not node.attributes.get("alpha", 1):
        return "Gemm with alpha 0"
    transposed = bool(node.attributes.get("transB", 0))
    d_out = context.shapes[weight][0 if transposed else 1]
    addend = node.operand(2)
    bias: tuple[str, ...] = (addend,) if context.is_bias(addend, weight, d_out) else ()
    outputs = node.outputs[0]
    if not addend:
        outputs, bias = _with_bias(context, outputs, weight, d_out, channel_axes=0)
    form = dense_form("OI" if transposed else "IO", bool(bias))
    return LayerMatch("fully_connected", (weight, *bias), x, outputs, form)


def _matmul(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    weight, x = node.inputs[index], node.inputs[1 - index]
    if x not in context.data:
        return _frozen_data(node, index)
    if index == 1 and context.is_weight(weight, 3):
        return _stacked_dense(context, node)
    if not context.is_weight(weight, 2) or len(context.shapes[x]) < 2:
        return f"MatMul of shapes {' and '.join(str(context.shapes[n]) for n in node.inputs)}"
    ids = find_token_ids(context, x) if index == 1 else ""
    if ids:
        return embedding_match(context, weight, ids, node.outputs[0])
    left = index == 0  # s = W·x: features are on the second last axis
    d_out = context.shapes[weight][0 if left else 1]
    outputs, bias = _with_bias(context, node.outputs[0], weight, d_out, channel_axes=int(left))
    form = dense_form("OI" if left else "IO", bool(bias), feature_axis=-2 if left else -1)
    return LayerMatch("fully_connected", (weight, *bias), x, outputs, form)


def _stacked_dense(context: MatchContext, node: Node) -> LayerMatch | str:
    """Match stacked dense layers: a MatMul with a stack of matrices between two Transposes."""
    weight = node.inputs[1]
    shape = context.shapes[weight]
    before = context.graph.producers.get(node.inputs[0])
    users = context.graph.consumers.get(node.outputs[0], ())
    after = users[0][0] if len(users) == 1 else None
    transposed = before and after and before.op == after.op == "Transpose"
    if not before or not after or not transposed or before.attributes != after.attributes:
        return f"MatMul of shapes {' and '.join(str(context.shapes[n]) for n in node.inputs)}"
    x, y = before.inputs[0], after.outputs[0]
    rank = len(context.shapes[x])
    perm = cast("tuple[int, ...]", before.attributes.get("perm", ()))
    if perm != (*range(rank - 3), rank - 2, rank - 3, rank - 1):
        return f"MatMul with a stack of matrices of shape {shape}"
    features = np.arange(shape[0] * shape[2]).reshape(shape[0], shape[2])
    bias = find_bias_behind_views(context, y, weight, features)
    form = stacked_dense_form(shape, has_bias=bool(bias))
    return LayerMatch("stacked_dense", (weight, *bias), x, y, form)


# -- convolutions ----------------------------------------------------------------------------------


def _conv(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    x, weight = node.inputs[0], node.inputs[index]
    shape = context.shapes[weight]
    if x not in context.data:
        return _frozen_data(node, index)
    axes, groups = len(shape) - 2, node.attributes.get("group", 1)
    if axes not in _CONVOLUTIONS:
        return f"convolution over {axes} axes"
    kind, spatial = _CONVOLUTIONS[axes]
    bias: tuple[str, ...] = ()
    outputs = node.outputs[0]
    if context.is_bias(node.operand(2), weight, shape[0]):
        bias = (node.operand(2),)
    elif not node.operand(2):
        outputs, bias = _with_bias(context, outputs, weight, shape[0], channel_axes=axes)
    options = _window(node, axes) | {"weight_format": f"OI{spatial}", "has_bias": bool(bias)}
    parameters = weight, *bias
    if groups == 1:
        return LayerMatch(kind, parameters, x, outputs, convolution_form(shape, **options))
    form = grouped_form(shape, cast("int", groups), **options)
    return LayerMatch("grouped_convolution", parameters, x, outputs, form)


def _conv_transpose(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    x, weight = node.inputs[0], node.inputs[index]
    axes, groups = len(context.shapes[weight]) - 2, node.attributes.get("group", 1)
    if x not in context.data:
        return _frozen_data(node, index)
    if axes not in _CONVOLUTIONS or groups != 1:
        return f"transposed convolution over {axes} axes in {groups} group(s)"
    automatic = str(node.attributes.get("auto_pad", "")).startswith("SAME")
    if "output_shape" in node.attributes or (automatic and "output_padding" in node.attributes):
        # The padding depends on the size of the images; the padding of a layer must not.
        return "transposed convolution whose padding depends on the size of its result"
    layout = f"IO{_CONVOLUTIONS[axes][1]}"
    form = transposed_form(context.shapes[weight], weight_format=layout, **_window(node, axes))
    return LayerMatch("conv_transpose", (weight,), x, node.outputs[0], form)


# Number of spatial axes to layer kind, and letters of the axes in formats.
_CONVOLUTIONS = {1: ("conv1d", "W"), 2: ("conv2d", "HW"), 3: ("convolution", "DHW")}


def _window(node: Node, axes: int) -> dict[str, Any]:
    """Return the arguments of a form for the images and the window of a convolution."""
    return {
        "strides": node.attributes.get("strides", (1,) * axes),
        "dilations": node.attributes.get("dilations", (1,) * axes),
        "padding": _padding(node, axes),
        "data_format": f"NC{_CONVOLUTIONS[axes][1]}",
    }


def _padding(node: Node, axes: int) -> Padding:
    automatic = node.attributes.get("auto_pad", "NOTSET")
    if automatic != "NOTSET":
        return {"SAME_UPPER": "SAME"}.get(str(automatic), str(automatic))
    pads = cast("tuple[int, ...]", node.attributes.get("pads", (0,) * 2 * axes))
    return tuple(zip(pads[:axes], pads[axes:], strict=True))


# -- pieces ----------------------------------------------------------------------------------------


def _with_bias(
    context: MatchContext, value: str, weight: str, d_out: int, channel_axes: int
) -> tuple[str, tuple[str, ...]]:
    """Return the pre-activation and its bias, which an Add after ``value`` may have."""
    user, position = context.only_user(value)
    if user is None:
        return value, ()
    if user.op == "Add":
        bias = user.inputs[1 - position]
        fits = context.is_bias(bias, weight, d_out, channel_axes)
        if fits and len(context.shapes[bias]) <= len(context.shapes[value]):
            return user.outputs[0], (bias,)
    numbers = np.arange(d_out).reshape(d_out, *[1] * channel_axes)
    return value, find_bias_behind_views(context, value, weight, numbers)


def _frozen_data(node: Node, index: int) -> str:
    return f"operand {index} of {node.op}, which does not depend on the data"


_MATCHERS: Mapping[tuple[str, int], Matcher] = {
    ("Gemm", 1): _gemm,
    ("MatMul", 0): _matmul,
    ("MatMul", 1): _matmul,
    ("Conv", 1): _conv,
    ("ConvTranspose", 1): _conv_transpose,
    ("Gather", 0): match_gather,
    ("PRelu", 1): slope,
    ("Mul", 0): scale_of_product,
    ("Mul", 1): scale_of_product,
    ("LayerNormalization", 1): scale_of_normalization,
    ("BatchNormalization", 1): scale_of_normalization,
    ("InstanceNormalization", 1): scale_of_normalization,
    ("GroupNormalization", 1): scale_of_normalization,
}
