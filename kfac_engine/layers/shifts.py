"""Matches shifts: parameters that are added to data, such as biases of frozen weights.

The gradient of a shift for one example is the sum of the gradient of the result over the axes along
which the shift is broadcast. In a canonical graph, no shift is subtracted from data.
"""

from collections.abc import Callable, Mapping

from kfac_engine.graph.structure import Node
from kfac_engine.layers.match import LayerMatch, MatchContext
from kfac_engine.layers.scales import axis_options, broadcast_mismatch, feature_axis


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
    return (
        f"{role}, {reason}"
        if reason
        else LayerMatch("shift", (value,), "", y, axis_options(context, y, axis))
    )


def _last(context: MatchContext, node: Node) -> int:
    del context, node
    return -1


def _channels(context: MatchContext, node: Node) -> int:
    del context, node
    return 1


# Operator and operand to the axis of the result with which the operand's last axis is aligned.
SHIFTS: Mapping[tuple[str, int], Callable[[MatchContext, Node], int | None]] = {
    ("Add", 0): _last,
    ("Add", 1): _last,
    ("Expand", 0): _last,
    ("Gemm", 2): _last,
    ("Sub", 0): _last,
    ("Tile", 0): _last,
    ("Conv", 2): _channels,
    ("ConvTranspose", 2): _channels,
    ("BatchNormalization", 2): feature_axis,
    ("GroupNormalization", 2): feature_axis,
    ("InstanceNormalization", 2): feature_axis,
    ("LayerNormalization", 2): feature_axis,
}
