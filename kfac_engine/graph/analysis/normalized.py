"""Builds normalizations without scale and shift, whose results the scale's gradient needs."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.graph.structure import Node


def before_scale(
    node: Node, dtype: DType, scale: tuple[int, ...], shift: tuple[int, ...]
) -> tuple[Node, Mapping[str, Array]]:
    """Return a copy of a normalization with scale one and shift zero, and its constants by name.

    Names follow from the names of ``node``, so that a graph computes the result once. The shape
    ``shift`` is empty without a shift. Further results of a LayerNormalization are mean and inverse
    deviation.
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
        # ONNX Runtime 1.31 overwrites running statistics in memory that the node shares with the
        # original node. With momentum one they do not change.
        attributes["momentum"] = 1.0
    core = replace(
        node,
        inputs=tuple(inputs),
        outputs=(name, *others),
        attributes=attributes,
        name=f"make {name}",
    )
    return core, values
