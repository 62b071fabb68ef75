"""Parameters that scale and shift the data: those of normalizations, and of a product with a sum.

What is scaled must be known. A product has it as an operand. A normalization computes it within: it
is added to the graph, as the same normalization with scale one and shift zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kfac_engine.graph.structure import Node
from kfac_engine.layers.found import Found, NewValue, Scene

_SCALE_PER_CHANNEL = 21  # operator set from which GroupNormalization has a scale a channel


def scale_of_product(scene: Scene, node: Node, index: int) -> Found | str:
    """The scale of ``x ∘ scale``, with a shift if that goes straight into a sum with one."""
    scale, x = node.inputs[index], node.inputs[1 - index]
    outputs = node.outputs[0]
    reason = _misfit(scene, scale, x, outputs, -1)
    if reason:
        return reason
    users = scene.graph.consumers.get(outputs, ())
    if len(users) == 1 and users[0][0].op == "Add" and outputs not in scene.graph.outputs:
        add, position = users[0]
        shift = add.inputs[1 - position]
        if _is_own(scene, shift) and not _misfit(scene, shift, outputs, add.outputs[0], -1):
            return Found("scale_and_shift", (scale, shift), x, add.outputs[0])
    return Found("scale_and_shift", (scale,), x, outputs)


def scale_of_normalization(scene: Scene, node: Node, index: int) -> Found | str:
    """The scale of a normalization, and its shift if that is a parameter."""
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


def _misfit(scene: Scene, parameter: str, x: str, y: str, axis: int) -> str:
    """Why a parameter does not scale or shift each example of ``x`` alike; empty where it does."""
    shape, data, result = scene.shapes[parameter], scene.shapes[x], scene.shapes[y]
    if len(data) < 2 or data != result:
        return f"shape {shape} with data of shape {data}"
    if data[0] > scene.batch:
        return "with more rows than examples on the first axis of the data"
    trailing = len(data) - 1 - axis % len(data)
    aligned = (1,) * (len(data) - trailing - len(shape)) + shape + (1,) * trailing
    return "different for each row of the first axis" if aligned[0] != 1 else ""


def _is_own(scene: Scene, name: str) -> bool:
    """Whether a parameter is used here alone."""
    return name in scene.trainable and len(scene.graph.consumers[name]) == 1


def _normalised(scene: Scene, node: Node) -> NewValue:
    """The result of a normalization before it is scaled and shifted."""
    name = f"{node.outputs[0]} before its scale"
    constants = scene.graph.constants
    one, zero = f"{name}: one", f"{name}: zero"
    values = {one: np.ones_like(constants[node.inputs[1]])}
    inputs = [node.inputs[0], one, *node.inputs[2:]]
    if len(inputs) > 2 and inputs[2]:
        inputs[2] = zero
        values[zero] = np.zeros(scene.shapes[node.inputs[2]], constants[node.inputs[1]].dtype)
    others = tuple(f"{name}: {output}" for output in node.outputs[1:] if output)
    made = replace(node, inputs=tuple(inputs), outputs=(name, *others), name=f"make {name}")
    return NewValue(made, values, node.outputs[0])
