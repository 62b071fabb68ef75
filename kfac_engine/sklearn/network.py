"""The network that an estimator trains if it has no model: dense layers with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kfac_engine._types import Array
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import ModelProto, build_model

_OPSET = 18
_FLOAT = np.dtype(np.float32)


def dense_network(sizes: Sequence[int], seed: int) -> ModelProto:
    """Return a network of dense layers with random weights and biases of zero.

    The variance of the weights is 2 / fan-in, which preserves the scale of activations through a
    ReLU (He et al. 2015).

    Args:
        sizes: Number of features, sizes of the hidden layers, and number of outputs.
        seed: Seed of the weights.

    Returns:
        A model with the input ``X`` ``(batch, sizes[0])`` and the output ``output``
        ``(batch, sizes[-1])`` in float32.
    """
    rng, last = np.random.default_rng(seed), len(sizes) - 1
    nodes: list[Node] = []
    constants: dict[str, Array] = {}
    value = "X"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        name = f"dense{i}"
        weight = rng.standard_normal((fan_out, fan_in)) * np.sqrt(2 / fan_in)
        constants[f"{name}.weight"] = weight.astype(_FLOAT)
        constants[f"{name}.bias"] = np.zeros(fan_out, _FLOAT)
        operands = value, f"{name}.weight", f"{name}.bias"
        value = "output" if i == last else f"{name}_out"
        nodes.append(Node("Gemm", operands, (value,), {"transB": 1}, name))
        if i < last:
            nodes.append(Node("Relu", (value,), (f"relu{i}_out",), name=f"relu{i}"))
            value = f"relu{i}_out"
    inputs = [Input("X", _FLOAT, ("batch", sizes[0]))]
    outputs = [Input("output", _FLOAT, ("batch", sizes[-1]))]
    return build_model(nodes, inputs, outputs, constants, _OPSET, name="dense network")
