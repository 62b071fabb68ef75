"""Parameters that are added to data and belong to no layer, such as biases of frozen weights.

The gradient of an example is the sum of the result's gradient over the axes that the parameter does
not have, whatever it is added to.
"""

from collections.abc import Callable, Mapping

from kfac_engine.graph.structure import Node
from kfac_engine.layers.match import LayerMatch, MatchContext
from kfac_engine.layers.scales import feature_axis, misfit, places


def match_shift(scene: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """The layer of a shift, an operand in ``SHIFTS``, or the reason why there is none."""
    value, y = node.inputs[index], node.outputs[0]
    role = f"operand {index} of {node.op}"
    if node.op == "Sub" and index == 1 and len(scene.graph.consumers[value]) > 1:
        return f"{role}, and used elsewhere"  # perhaps with the other sign
    axis = SHIFTS[node.op, index](scene, node)
    if axis is None:
        return f"{role}, which is not one number a channel"
    reason = misfit(scene, value, y, axis)
    return (
        f"{role}, {reason}"
        if reason
        else LayerMatch("shift", (value,), "", y, places(scene, y, axis))
    )


def _last(scene: MatchContext, node: Node) -> int:
    del scene, node
    return -1


def _channels(scene: MatchContext, node: Node) -> int:
    del scene, node
    return 1


# Operator and operand to the axis of the result that the operand's last axis lies along.
SHIFTS: Mapping[tuple[str, int], Callable[[MatchContext, Node], int | None]] = {
    ("Add", 0): _last,
    ("Add", 1): _last,
    ("Expand", 0): _last,
    ("Gemm", 2): _last,
    ("Sub", 0): _last,
    ("Sub", 1): _last,
    ("Tile", 0): _last,
    ("Conv", 2): _channels,
    ("ConvTranspose", 2): _channels,
    ("BatchNormalization", 2): feature_axis,
    ("GroupNormalization", 2): feature_axis,
    ("InstanceNormalization", 2): feature_axis,
    ("LayerNormalization", 2): feature_axis,
}
