"""Parameters that scale data, and shifts that follow: of normalizations and of products.

The data before scaling must be a value of the graph. A product has it as an operand. A
normalization and a ``PRelu`` compute it internally: it is added to the graph, as the same
normalization with scale one and shift zero, or as the data below zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.graph.analysis.normalized import before_scale
from kfac_engine.graph.analysis.subgraph import handed_on
from kfac_engine.graph.structure import Node
from kfac_engine.layers.match import LayerMatch, MatchContext, NewValue

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


def scale_of_product(scene: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """The scale of ``x ∘ scale``, with a shift if that goes straight into a sum with one.

    A normalization may multiply the scale by the deviation ``x`` of each row, and ``z`` by that.

    Args:
        scene: The graph.
        node: A Mul.
        index: The operand that is a parameter.

    Returns:
        The layer, or why there is none.
    """
    x, y = node.inputs[1 - index], node.outputs[0]
    scale = _carried(scene, node.inputs[index])
    if scale is None or x not in scene.data:
        return f"operand {index} of Mul, which does not depend on the data"
    reason = misfit(scene, scale.value, y)
    if reason or len(scene.shapes[x]) != len(scene.shapes[y]):
        return reason or _of_shapes(scene, scale.value, x)
    options = places(scene, y, scale.axis)
    shift, shifted = _shift(scene, scale, y)
    if shift:
        return LayerMatch("scale_and_shift", (scale.parameter, shift), x, shifted, options)
    outer, position = scene.only_user(y)
    if outer is not None and outer.op == "Mul":
        z, product = outer.inputs[1 - position], outer.outputs[0]
        shift, shifted = _shift(scene, scale, product)
        whole = np.broadcast_shapes(scene.shapes[x], scene.shapes[z]) == scene.shapes[product]
        if shift and whole and _alike(scene, y, product):
            made = f"{product} before its scale"
            computed = NewValue(Node("Mul", (x, z), (made,), {}, f"make {made}"), {}, product)
            names = scale.parameter, shift
            return LayerMatch(
                "scale_and_shift", names, made, shifted, options, computed=(computed,)
            )
    return LayerMatch("scale_and_shift", (scale.parameter,), x, y, options)


def scale_of_normalization(scene: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """The scale of a normalization, and its shift if that is a parameter."""
    if node.inputs[0] not in scene.data:
        return f"scale of {node.op}, which does not depend on the data"
    scale, y = node.inputs[index], node.outputs[0]
    axis = feature_axis(scene, node)
    if axis is None:
        return f"scale of {node.op} that is not one number a channel"
    reason = misfit(scene, scale, y, axis)
    if reason:
        return f"scale of {node.op}, {reason}"
    shift = node.inputs[2] if len(node.inputs) > 2 else ""
    own = scene.goes_with(shift, scale)
    computed = _normalised(scene, node)
    return LayerMatch(
        "scale_and_shift",
        (scale, shift) if own else (scale,),
        computed.node.outputs[0],
        y,
        places(scene, y, axis),
        computed=(computed,),
    )


def slope(scene: MatchContext, node: Node, index: int) -> LayerMatch | str:
    """The slopes of a ``PRelu``: they scale the data below zero."""
    x, y = node.inputs[0], node.outputs[0]
    reason = misfit(scene, node.inputs[index], y)
    if reason:
        return f"slope of PRelu, {reason}"
    name = f"{y} below zero"
    zero = f"{name}: zero"
    computed = NewValue(
        Node("Min", (x, zero), (name,), {}, f"make {name}"),
        {zero: np.zeros((), scene.dtypes[x])},
        x,
    )
    parameters, options = (node.inputs[index],), places(scene, y)
    return LayerMatch("scale_and_shift", parameters, name, y, options, computed=(computed,))


def feature_axis(scene: MatchContext, node: Node) -> int | None:
    """The axis that the last axis of a normalization's scale lies along; None if along none."""
    return _FEATURE_AXES[node.op](scene)


_FEATURE_AXES: Mapping[str, Callable[[MatchContext], int | None]] = {
    "LayerNormalization": lambda scene: -1,
    "BatchNormalization": lambda scene: 1,
    "InstanceNormalization": lambda scene: 1,
    "GroupNormalization": lambda scene: 1 if scene.graph.opset >= _SCALE_PER_CHANNEL else None,
}


def misfit(scene: MatchContext, value: str, y: str, axis: int = -1) -> str:
    """The reason why a value differs between examples of ``y``; empty where it does not."""
    shape, data, batch = scene.shapes[value], scene.shapes[y], scene.axes.get(y)
    if batch is None:
        return f"the examples do not lie alone on an axis of '{y}'"
    trailing = len(data) - 1 - axis % len(data)
    missing = len(data) - trailing - len(shape)
    if missing < 0:
        return _of_shapes(scene, value, y)
    aligned = (1,) * missing + shape + (1,) * trailing
    if any(own not in (1, side) for own, side in zip(aligned, data, strict=True)):
        return _of_shapes(scene, value, y)
    return f"different for each example, on axis {batch} of '{y}'" if aligned[batch] != 1 else ""


def places(scene: MatchContext, y: str, axis: int = -1) -> dict[str, object]:
    """Options of a registration: the axes of ``y`` that hold features and examples."""
    options: dict[str, object] = {} if axis == -1 else {"feature_axis": axis}
    return options | ({"batch_axis": scene.axes[y]} if scene.axes[y] else {})


def _shift(scene: MatchContext, scale: _Carried, y: str) -> tuple[str, str]:
    """The shift that goes with a scale, and the sum with it; empty where there is none."""
    add, position = scene.only_user(y)
    if add is None or add.op != "Add" or scene.shapes[add.outputs[0]] != scene.shapes[y]:
        return "", ""
    shift = _carried(scene, add.inputs[1 - position])
    # Both lie along one axis of the data, or each is as wide as it is.
    if shift is None or shift.axis != scale.axis or not scene.goes_with(shift.value, scale.value):
        return "", ""
    fits = not misfit(scene, shift.value, add.outputs[0])
    return (shift.parameter, add.outputs[0]) if fits else ("", "")


def _carried(scene: MatchContext, value: str) -> _Carried | None:
    """The parameter behind a value that no other layout is used of; None where there is none."""
    if value not in scene.trainable or value in scene.shared:
        return None
    held = scene.held.get(value)
    wide = [i for i, side in enumerate(scene.shapes[value]) if side != 1]
    if held is None or not held.in_order or len(scene.shapes[held.parameter]) != 1 or len(wide) > 1:
        return _Carried(value, value)
    if handed_on(scene.graph, value) != held.parameter:
        return _Carried(value, value)
    axis = wide[0] - len(scene.shapes[value]) if wide else -1
    return _Carried(held.parameter, value, axis)


def _alike(scene: MatchContext, first: str, second: str) -> bool:
    """Whether two values have as many axes, and the examples on the same one."""
    ranks = {len(scene.shapes[name]) for name in (first, second)}
    return len(ranks) == 1 and scene.axes.get(first) == scene.axes.get(second)


def _of_shapes(scene: MatchContext, value: str, data: str) -> str:
    return f"shape {scene.shapes[value]} with data of shape {scene.shapes[data]}"


def _normalised(scene: MatchContext, node: Node) -> NewValue:
    """The result of a normalization before it is scaled and shifted."""
    scale, shift = (*node.inputs[1:3], "")[:2]
    made, values = before_scale(
        node, scene.dtypes[scale], scene.shapes[scale], scene.shapes.get(shift, ())
    )
    return NewValue(made, values, node.outputs[0])
