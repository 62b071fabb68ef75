"""Finds the bias of a layer whose result is transposed or reshaped before the addition."""

from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.analysis.rearrangements import RELAYS
from kfac_engine.layers.match import MatchContext
from kfac_engine.layers.parameter_slices import rearrange_entries

_VIEWS = RELAYS | {"Slice"}


def find_bias_behind_views(
    context: MatchContext, value: str, weight: str, numbers: Array
) -> tuple[str, ...]:
    """Return the bias that is added to the result of a layer after a transposition or reshape.

    Args:
        context: The graph.
        value: Name of the result of the layer.
        weight: Name of the weight.
        numbers: Index of the feature of each entry, in a shape that broadcasts to the result.

    Returns:
        Name of the bias, or an empty tuple.
    """
    features: Array = np.broadcast_to(numbers, context.shapes[value])
    user, position = context.only_user(value)
    # Omitted entries have no gradient.
    while user is not None and user.op in _VIEWS and position == 0:
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
