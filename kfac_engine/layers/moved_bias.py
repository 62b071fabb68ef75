"""The bias of a layer whose result is turned around or given other axes before it is added."""

from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.moves import RELAYS
from kfac_engine.graph.structure import Node
from kfac_engine.layers.found import Scene
from kfac_engine.layers.parts import moved_entries


def moved_bias(scene: Scene, value: str, weight: str, numbers: Array) -> tuple[str, ...]:
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
    user, position = _only_user(scene, value)
    while user is not None and not user.domain and user.op in RELAYS and position == 0:
        features = moved_entries(features, user, scene.shapes[user.outputs[0]])
        user, position = _only_user(scene, user.outputs[0])
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


def _only_user(scene: Scene, value: str) -> tuple[Node | None, int]:
    users = scene.graph.consumers.get(value, ())
    return users[0] if len(users) == 1 and value not in scene.graph.outputs else (None, 0)
