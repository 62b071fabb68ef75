"""Decomposes fused operators that ONNX Runtime executes on accelerators only."""

from collections.abc import Callable, Mapping
from math import pi, sqrt

import numpy as np

from kfac_engine.graph.passes.decomposition import DecompositionBuilder


def _bias_add(b: DecompositionBuilder) -> None:
    """Write ``x + bias + skip``."""
    x, bias, skip = b.operands(3, 3)
    b.op("Add", b.op("Add", x, bias), skip, result=b.node.outputs[0])


def _bias_split_gelu(b: DecompositionBuilder) -> None:
    """Write the first half of the features of ``x + bias`` times Gelu of the second half."""
    x, bias = b.operands(2, 2)
    value, gate = b.halves(b.op("Add", x, bias))
    bell = b.op("Erf", b.op("Mul", gate, _like(b, gate, 1 / sqrt(2))))
    half = b.op("Mul", gate, _like(b, gate, 0.5))
    gelu = b.op("Mul", half, b.op("Add", bell, _like(b, gate, 1)))
    b.op("Mul", value, gelu, result=b.node.outputs[0])


def _gemm_fast_gelu(b: DecompositionBuilder) -> None:
    """Write Gelu of ``x W + bias``, in its approximation by tanh."""
    x, weights, bias = b.operands(2, 3)
    y = b.op("MatMul", x, weights)
    y = b.op("Add", y, bias) if bias else y
    square = b.op("Mul", b.op("Mul", y, y), _like(b, y, 0.044715))
    inner = b.op("Mul", y, b.op("Add", square, _like(b, y, 1)))
    bell = b.op("Tanh", b.op("Mul", inner, _like(b, y, sqrt(2 / pi))))
    half = b.op("Mul", y, _like(b, y, 0.5))
    b.op("Mul", half, b.op("Add", bell, _like(b, y, 1)), result=b.node.outputs[0])


def _group_norm(b: DecompositionBuilder) -> None:
    """Write GroupNormalization, by default with channels last, and an optional Swish."""
    x, scale, shift = b.operands(3, 3)
    _normalized(b, x, scale, shift)


def _skip_group_norm(b: DecompositionBuilder) -> None:
    """Write ``GroupNorm`` of a sum, with the sum as an optional second result."""
    x, scale, shift, skip, bias = b.operands(4, 5)
    summed = b.op("Add", x, b.op("Add", skip, bias) if bias else skip)
    if len(b.node.outputs) > 1 and b.node.outputs[1]:
        b.op("Identity", summed, result=b.node.outputs[1])
    _normalized(b, summed, scale, shift)


def _normalized(b: DecompositionBuilder, x: str, scale: str, shift: str) -> None:
    last = b.number("channels_last", 1)
    groups = int(b.number("groups", 1))
    image = b.op("Transpose", x, perm=(0, 3, 1, 2)) if last else x
    apart = b.op("Reshape", image, b.constant(np.array([0, groups, -1]), label="apart"))
    ones, zeros = (_like(b, scale, n, (groups,)) for n in (1, 0))
    epsilon = b.number("epsilon", 1e-5)
    even = b.op("InstanceNormalization", apart, ones, zeros, epsilon=epsilon)
    even = b.op("Reshape", even, b.op("Shape", image))
    axes = b.constant(np.array([1, 2]), label="axes")
    scaled = b.op("Mul", even, b.op("Unsqueeze", scale, axes))
    y = b.op("Add", scaled, b.op("Unsqueeze", shift, axes))
    y = b.op("Mul", y, b.op("Sigmoid", y)) if b.number("activation", 0) else y
    if last:
        b.op("Transpose", y, result=b.node.outputs[0], perm=(0, 2, 3, 1))
    else:
        b.op("Identity", y, result=b.node.outputs[0])


def _like(b: DecompositionBuilder, value: str, number: float, shape: tuple[int, ...] = ()) -> str:
    """Add a constant and its Cast to the element type of ``value``; return the result's name."""
    label = f"number_{len(b.constants)}"
    return b.op("CastLike", b.constant(np.full(shape, number), label=label), value)


DECOMPOSITIONS: Mapping[str, Callable[[DecompositionBuilder], None]] = {
    "com.microsoft::BiasAdd": _bias_add,
    "com.microsoft::BiasSplitGelu": _bias_split_gelu,
    "com.microsoft::GemmFastGelu": _gemm_fast_gelu,
    "com.microsoft::GroupNorm": _group_norm,
    "com.microsoft::SkipGroupNorm": _skip_group_norm,
}
