"""Parameters that scale and shift the data: those of normalizations, and of a product with a sum.

What is scaled must be known. A product has it as an operand. A normalization computes it within: it
is added to the graph, as the same normalization with scale one and shift zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kfac_engine.graph.normalised import before_scale
from kfac_engine.graph.structure import Node
from kfac_engine.layers.found import Found, NewValue, Scene

_SCALE_PER_CHANNEL = 21  # operator set from which GroupNormalization has a scale a channel


@dataclass(frozen=True, slots=True)
class _Carried:
    """A parameter on its way to the data.

    Attributes:
        parameter: Its name.
        value: What is broadcast against the data: the parameter, or a view of it with more axes.
        axis: Axis of the data, counted from its end, that the parameter's last axis lies along.
    """

    parameter: str
    value: str
    axis: int = -1


def scale_of_product(scene: Scene, node: Node, index: int) -> Found | str:
    """The scale of ``x ∘ scale``, with a shift if that goes straight into a sum with one."""
    x, y = node.inputs[1 - index], node.outputs[0]
    scale = _carried(scene, node.inputs[index])
    if scale is None or x not in scene.data:
        return f"operand {index} of Mul, which does not depend on the data"
    reason = _misfit(scene, scale.value, x, y)
    if reason:
        return reason
    options = {"feature_axis": scale.axis} if scale.axis != -1 else {}
    users = scene.graph.consumers.get(y, ())
    if len(users) == 1 and users[0][0].op == "Add" and y not in scene.graph.outputs:
        add, position = users[0]
        shift = _carried(scene, add.inputs[1 - position])
        # Both lie along one axis of the data, or each is as wide as it is.
        fits = shift is not None and shift.axis == scale.axis
        if shift and fits and not _misfit(scene, shift.value, y, add.outputs[0]):
            names = scale.parameter, shift.parameter
            return Found("scale_and_shift", names, x, add.outputs[0], options)
    return Found("scale_and_shift", (scale.parameter,), x, y, options)


def _carried(scene: Scene, value: str) -> _Carried | None:
    """The parameter behind a value that is used once; None where there is none."""
    if not _is_own(scene, value):
        return None
    held = scene.held.get(value)
    wide = [i for i, side in enumerate(scene.shapes[value]) if side != 1]
    if held is None or not held.in_order or len(scene.shapes[held.parameter]) != 1 or len(wide) > 1:
        return _Carried(value, value)
    axis = wide[0] - len(scene.shapes[value]) if wide else -1
    return _Carried(held.parameter, value, axis)


def scale_of_normalization(scene: Scene, node: Node, index: int) -> Found | str:
    """The scale of a normalization, and its shift if that is a parameter."""
    if node.inputs[0] not in scene.data:
        return f"scale of {node.op}, which does not depend on the data"
    scale, x, y = node.inputs[index], node.inputs[0], node.outputs[0]
    axis = _FEATURE_AXES[node.op](scene, node)
    if axis is None:
        return f"scale of {node.op} that is not one number a channel"
    reason = _misfit(scene, scale, x, y, axis)
    if reason:
        return f"scale of {node.op}, {reason}"
    shift = node.inputs[2] if len(node.inputs) > 2 else ""
    own = _is_own(scene, shift) and not _misfit(scene, shift, x, y, axis)
    normalised = _normalised(scene, node)
    return Found(
        "scale_and_shift",
        (scale, shift) if own else (scale,),
        normalised.node.outputs[0],
        y,
        {"feature_axis": axis},
        computed=normalised,
    )


# Operator to the axis that the last axis of its scale lies along; None where it lies along none.
_FEATURE_AXES: Mapping[str, Callable[[Scene, Node], int | None]] = {
    "LayerNormalization": lambda scene, node: -1,
    "BatchNormalization": lambda scene, node: 1,
    "InstanceNormalization": lambda scene, node: 1,
    "GroupNormalization": lambda scene, node: (
        1 if scene.graph.opset >= _SCALE_PER_CHANNEL else None
    ),
}


def _misfit(scene: Scene, value: str, x: str, y: str, axis: int = -1) -> str:
    """Why a value does not scale or shift each example of ``x`` alike; empty where it does."""
    shape, data, result = scene.shapes[value], scene.shapes[x], scene.shapes[y]
    if len(data) < 2 or data != result:
        return f"shape {shape} with data of shape {data}"
    if data[0] > scene.batch:
        return "with more rows than examples on the first axis of the data"
    trailing = len(data) - 1 - axis % len(data)
    aligned = (1,) * (len(data) - trailing - len(shape)) + shape + (1,) * trailing
    return "different for each row of the first axis" if aligned[0] != 1 else ""


def _is_own(scene: Scene, name: str) -> bool:
    """Whether a parameter is used here alone."""
    own = name in scene.trainable and name not in scene.shared
    return own and len(scene.graph.consumers[name]) == 1


def _normalised(scene: Scene, node: Node) -> NewValue:
    """The result of a normalization before it is scaled and shifted."""
    scale, shift = (*node.inputs[1:3], "")[:2]
    made, values = before_scale(
        node, scene.dtypes[scale], scene.shapes[scale], scene.shapes.get(shift, ())
    )
    return NewValue(made, values, node.outputs[0])
