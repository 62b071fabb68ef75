"""What a normalization makes before it scales and shifts it: wanted by whoever learns the scale."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.graph.structure import Node


def before_scale(
    node: Node, dtype: DType, scale: tuple[int, ...], shift: tuple[int, ...]
) -> tuple[Node, Mapping[str, Array]]:
    """The same normalization with scale one and shift zero.

    Whoever asks gets the same names, so that a graph computes it once.

    Args:
        node: A normalization with operands x, scale and perhaps a shift.
        dtype: Element type of the scale.
        scale: Shape of the scale.
        shift: Shape of the shift, empty where there is none.

    Returns:
        The node, and its constants by name. A LayerNormalization gives mean and inverse deviation
        as well.
    """
    name = f"{node.outputs[0]} before its scale"
    one, zero = f"{name}: one", f"{name}: zero"
    values = {one: np.ones(scale, dtype)}
    inputs = [node.inputs[0], one, *node.inputs[2:]]
    if len(inputs) > 2 and inputs[2]:
        inputs[2] = zero
        values[zero] = np.zeros(shift, dtype)
    others = [f"{name}: {output}" for output in node.outputs[1:] if output]
    attributes = dict(node.attributes)
    if node.op == "LayerNormalization":
        others = [f"{name}: mean", f"{name}: inverse deviation"]
    elif node.op == "BatchNormalization":
        # ONNX Runtime 1.31 writes new running statistics over the old ones, in the memory that the
        # node shares with the original: with momentum one they stay what they are.
        attributes["momentum"] = 1.0
    core = replace(
        node,
        inputs=tuple(inputs),
        outputs=(name, *others),
        attributes=attributes,
        name=f"make {name}",
    )
    return core, values
