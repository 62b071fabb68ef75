"""The bias of a layer whose result is turned around or given other axes before it is added."""

from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.analysis.rearrangements import RELAYS
from kfac_engine.graph.structure import Node
from kfac_engine.layers.match import MatchContext
from kfac_engine.layers.parameter_slices import moved_entries


def moved_bias(scene: MatchContext, value: str, weight: str, numbers: Array) -> tuple[str, ...]:
    """The bias that is added to a layer's result somewhere behind it.

    Args:
        scene: The graph.
        value: The result.
        weight: The layer's weight.
        numbers: Of its features, each once, in an array that is broadcast to the result.

    Returns:
        The bias, or nothing.
    """
    features: Array = np.broadcast_to(numbers, scene.shapes[value])
    user, position = scene.only_user(value)
    while user is not None and _is_view(scene, user) and position == 0:
        constants, shape = scene.graph.constants, scene.shapes[user.outputs[0]]
        features = moved_entries(features, user, constants, shape)
        user, position = scene.only_user(user.outputs[0])
    if user is None or user.op != "Add":
        return ()
    bias = user.inputs[1 - position]
    if not scene.goes_with(bias, weight) or scene.shapes[user.outputs[0]] != features.shape:
        return ()
    sides, count = scene.shapes[bias], numbers.size
    # Which feature each entry of the bias is added to: to one, and in the features' order.
    alike = prod(sides) == count and np.array_equal(
        np.broadcast_to(np.arange(count).reshape(sides), features.shape), features
    )
    return (bias,) if alike else ()


def _is_view(scene: MatchContext, node: Node) -> bool:
    """Whether a node only moves entries; those that a Slice leaves out have no gradient."""
    known = all(name in scene.graph.constants for name in node.inputs[1:] if name)
    return not node.domain and (node.op in RELAYS or (node.op == "Slice" and known))
