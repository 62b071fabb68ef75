"""Matches scales and shifts: parameters that multiply data or are added to data.

The input of a scale is the data before scaling. In a product, the data are an operand. The graph of
a normalization or a ``PRelu`` does not contain these data. A new value computes them: the same
normalization with scale one and shift zero, or the negative part of the data. A shift after a scale
belongs to the scale; other shifts are layers, such as biases of frozen weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.graph.analysis.normalized import before_scale
from kfac_engine.graph.analysis.subgraph import PASS_ON
from kfac_engine.graph.structure import Node
from kfac_engine.layers.layer_forms import BroadcastShape, ScaleShiftForm
from kfac_engine.layers.match import LayerMatch, MatchContext, NewValue

_SCALE_PER_CHANNEL = 21  # operator set since which GroupNormalization has a scale for each channel


@dataclass(frozen=True, slots=True)
class _BroadcastParameter:
    """A parameter that is broadcast to data."""

    parameter: str  # name of the parameter
    value: str  # name of the operand: the parameter, or the parameter with more axes
    # Negative number of the axis of the data with which the last axis of the parameter is aligned.
    axis: int = -1


def scale_of_product(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match the scale of a product ``x ∘ scale``, with the shift that is added to it.

    A normalization may compute ``(scale · x) ∘ z``; the data are then the product ``x ∘ z``. The
    scale is operand ``index`` of a Mul. If there is no layer, the result is the reason.
    """
    x, y = node.inputs[1 - index], node.outputs[0]
    scale = _broadcast_parameter(context, node.inputs[index])
    if scale is None or x not in context.data:
        return f"operand {index} of Mul, which does not depend on the data"
    reason = broadcast_mismatch(context, scale.value, y)
    if reason or len(context.shapes[x]) != len(context.shapes[y]):
        return reason or _describe_shapes(context, scale.value, x)
    shift, shifted = _shift(context, scale, y)
    if shift:
        names = scale.parameter, shift
        form = _form(context, y, scale.axis, *names)
        return LayerMatch("scale_and_shift", names, x, shifted, form)
    outer, position = context.only_user(y)
    if outer is not None and outer.op == "Mul":
        z, product = outer.inputs[1 - position], outer.outputs[0]
        shift, shifted = _shift(context, scale, product)
        whole = np.broadcast_shapes(context.shapes[x], context.shapes[z]) == context.shapes[product]
        if shift and whole and _same_axes(context, y, product):
            unscaled = f"{product} before its scale"
            node = Node("Mul", (x, z), (unscaled,), {}, f"make {unscaled}")
            computed = NewValue(node, {}, product)
            names = scale.parameter, shift
            form = _form(context, y, scale.axis, *names)
            return LayerMatch(
                "scale_and_shift", names, unscaled, shifted, form, computed=(computed,)
            )
    form = _form(context, y, scale.axis, scale.parameter)
    return LayerMatch("scale_and_shift", (scale.parameter,), x, y, form)


def scale_of_normalization(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match the scale of a normalization, with its shift if the shift is a parameter."""
    if node.inputs[0] not in context.data:
        return f"scale of {node.op}, which does not depend on the data"
    scale, y = node.inputs[index], node.outputs[0]
    axis = feature_axis(context, node)
    if axis is None:
        return f"scale of {node.op} without one number for each channel"
    reason = broadcast_mismatch(context, scale, y, axis)
    if reason:
        return f"scale of {node.op}, {reason}"
    shift = node.operand(2)
    parameters = (scale, shift) if context.goes_with(shift, scale) else (scale,)
    computed = _normalised(context, node)
    x, form = computed.node.outputs[0], _form(context, y, axis, *parameters)
    return LayerMatch("scale_and_shift", parameters, x, y, form, computed=(computed,))


def slope(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match the slopes of a ``PRelu``, which scale the data below zero."""
    x, y = node.inputs[0], node.outputs[0]
    reason = broadcast_mismatch(context, node.inputs[index], y)
    if reason:
        return f"slope of PRelu, {reason}"
    name = f"{y} below zero"
    zero = f"{name}: zero"
    computed = NewValue(
        Node("Min", (x, zero), (name,), {}, f"make {name}"),
        {zero: np.zeros((), context.dtypes[x])},
        x,
    )
    parameter = node.inputs[index]
    form = _form(context, y, -1, parameter)
    return LayerMatch("scale_and_shift", (parameter,), name, y, form, computed=(computed,))


def feature_axis(context: MatchContext, node: Node) -> int | None:
    """Return the axis of the data with which the scale of a normalization is aligned, or None."""
    return _FEATURE_AXES[node.op](context)


_FEATURE_AXES: Mapping[str, Callable[[MatchContext], int | None]] = {
    "LayerNormalization": lambda context: -1,
    "BatchNormalization": lambda context: 1,
    "InstanceNormalization": lambda context: 1,
    "GroupNormalization": lambda context: 1 if context.graph.opset >= _SCALE_PER_CHANNEL else None,
}


def broadcast_mismatch(context: MatchContext, value: str, y: str, axis: int = -1) -> str:
    """Return the reason why a value differs between examples of ``y``, or ``""``."""
    shape, data, batch = context.shapes[value], context.shapes[y], context.axes.get(y)
    if batch is None:
        return f"no axis of '{y}' contains the examples alone"
    trailing = len(data) - 1 - axis % len(data)
    missing = len(data) - trailing - len(shape)
    if missing < 0:
        return _describe_shapes(context, value, y)
    aligned = (1,) * missing + shape + (1,) * trailing
    if any(entries not in (1, size) for entries, size in zip(aligned, data, strict=True)):
        return _describe_shapes(context, value, y)
    return f"different for each example, on axis {batch} of '{y}'" if aligned[batch] != 1 else ""


def _broadcast(context: MatchContext, parameter: str, y: str, axis: int) -> BroadcastShape:
    """Return the broadcast of a parameter to ``y``, aligned with an axis of its features."""
    return BroadcastShape(context.shapes[parameter], axis, context.axes[y])


def _form(context: MatchContext, y: str, axis: int, scale: str, shift: str = "") -> ScaleShiftForm:
    """Return the form of a scale and, if there is one, of a shift."""
    shifted = _broadcast(context, shift, y, axis) if shift else None
    return ScaleShiftForm(_broadcast(context, scale, y, axis), shifted)


def _shift(context: MatchContext, scale: _BroadcastParameter, y: str) -> tuple[str, str]:
    """Return the names of the shift after a scale and of their sum; empty without a shift."""
    add, position = context.only_user(y)
    if add is None or add.op != "Add" or context.shapes[add.outputs[0]] != context.shapes[y]:
        return "", ""
    shift = _broadcast_parameter(context, add.inputs[1 - position])
    # Scale and shift must be aligned with the same axis of the data.
    if shift is None or shift.axis != scale.axis or not context.goes_with(shift.value, scale.value):
        return "", ""
    fits = not broadcast_mismatch(context, shift.value, add.outputs[0])
    return (shift.parameter, add.outputs[0]) if fits else ("", "")


def _broadcast_parameter(context: MatchContext, value: str) -> _BroadcastParameter | None:
    """Return the parameter that a value contains; None if it has none or shares its entries."""
    if value not in context.trainable or value in context.shared:
        return None
    view = context.views.get(value)
    wide = [i for i, size in enumerate(context.shapes[value]) if size != 1]
    if (
        view is None
        or not view.in_order
        or len(context.shapes[view.parameter]) != 1
        or len(wide) > 1
    ):
        return _BroadcastParameter(value, value)
    if context.graph.source(value, PASS_ON) != view.parameter:
        return _BroadcastParameter(value, value)
    axis = wide[0] - len(context.shapes[value]) if wide else -1
    return _BroadcastParameter(view.parameter, value, axis)


def _same_axes(context: MatchContext, first: str, second: str) -> bool:
    """Return whether two values have equal ranks and the same axis of examples."""
    ranks = {len(context.shapes[name]) for name in (first, second)}
    return len(ranks) == 1 and context.axes.get(first) == context.axes.get(second)


def _describe_shapes(context: MatchContext, value: str, data: str) -> str:
    return f"shape {context.shapes[value]} with data of shape {context.shapes[data]}"


def _normalised(context: MatchContext, node: Node) -> NewValue:
    """Return the result of a normalization before it is scaled and shifted."""
    scale, shift = (*node.inputs[1:3], "")[:2]
    normalization, constants = before_scale(
        node, context.dtypes[scale], context.shapes[scale], context.shapes.get(shift, ())
    )
    return NewValue(normalization, constants, node.outputs[0])


# -- shifts without a scale ------------------------------------------------------------------------
#
# The gradient of a shift for one example is the sum of the gradient of the result over the axes
# along which the shift is broadcast. In a canonical graph, no shift is subtracted from data.


def match_shift(context: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """Match a shift, an operand in ``SHIFTS``; return the reason if there is no layer."""
    value, y = node.inputs[index], node.outputs[0]
    role = f"operand {index} of {node.op}"
    if node.attributes.get("beta", 1) != 1:
        return f"{role}, which is multiplied by beta"
    axis = SHIFTS[node.op, index](context, node)
    if axis is None:
        return f"{role}, which does not have one number for each channel"
    reason = broadcast_mismatch(context, value, y, axis)
    if reason:
        return f"{role}, {reason}"
    form = ScaleShiftForm(None, _broadcast(context, value, y, axis))
    return LayerMatch("shift", (value,), "", y, form)


# Operator and operand to the axis of the result with which the operand's last axis is aligned.
SHIFTS: Mapping[tuple[str, int], Callable[[MatchContext, Node], int | None]] = {
    **dict.fromkeys(
        [("Add", 0), ("Add", 1), ("Expand", 0), ("Gemm", 2), ("Sub", 0), ("Tile", 0)],
        lambda context, node: -1,
    ),
    **dict.fromkeys([("Conv", 2), ("ConvTranspose", 2)], lambda context, node: 1),
    ("BatchNormalization", 2): feature_axis,
    ("GroupNormalization", 2): feature_axis,
    ("InstanceNormalization", 2): feature_axis,
    ("LayerNormalization", 2): feature_axis,
}
