"""Fused operators for which ONNX Runtime has kernels on accelerators only, in standard ones."""

from collections.abc import Callable, Mapping
from math import pi, sqrt

import numpy as np

from kfac_engine.graph.passes.decomposition import Spelled


def _bias_add(s: Spelled) -> None:
    """``x + bias + skip``."""
    x, bias, skip = s.operands(3, 3)
    s.op("Add", s.op("Add", x, bias), skip, made=s.node.outputs[0])


def _bias_split_gelu(s: Spelled) -> None:
    """The first half of the features of ``x + bias`` times Gelu of the second."""
    x, bias = s.operands(2, 2)
    kept, gate = s.halves(s.op("Add", x, bias))
    bell = s.op("Erf", s.op("Mul", gate, _like(s, gate, 1 / sqrt(2))))
    half = s.op("Mul", gate, _like(s, gate, 0.5))
    gelu = s.op("Mul", half, s.op("Add", bell, _like(s, gate, 1)))
    s.op("Mul", kept, gelu, made=s.node.outputs[0])


def _gemm_fast_gelu(s: Spelled) -> None:
    """Gelu, in its approximation by tanh, of ``x W + bias``."""
    x, weights, bias = s.operands(2, 3)
    y = s.op("MatMul", x, weights)
    y = s.op("Add", y, bias) if bias else y
    square = s.op("Mul", s.op("Mul", y, y), _like(s, y, 0.044715))
    inner = s.op("Mul", y, s.op("Add", square, _like(s, y, 1)))
    bell = s.op("Tanh", s.op("Mul", inner, _like(s, y, sqrt(2 / pi))))
    half = s.op("Mul", y, _like(s, y, 0.5))
    s.op("Mul", half, s.op("Add", bell, _like(s, y, 1)), made=s.node.outputs[0])


def _group_norm(s: Spelled) -> None:
    """GroupNormalization with channels last, unless told otherwise, and perhaps a Swish."""
    x, scale, shift = s.operands(3, 3)
    _normalized(s, x, scale, shift)


def _skip_group_norm(s: Spelled) -> None:
    """``GroupNorm`` of a sum, which may be a result too."""
    x, scale, shift, skip, bias = s.operands(4, 5)
    summed = s.op("Add", x, s.op("Add", skip, bias) if bias else skip)
    if len(s.node.outputs) > 1 and s.node.outputs[1]:
        s.op("Identity", summed, made=s.node.outputs[1])
    _normalized(s, summed, scale, shift)


def _normalized(s: Spelled, x: str, scale: str, shift: str) -> None:
    last = s.number("channels_last", 1)
    groups = int(s.number("groups", 1))
    image = s.op("Transpose", x, perm=(0, 3, 1, 2)) if last else x
    apart = s.op("Reshape", image, s.constant("apart", np.array([0, groups, -1])))
    ones, zeros = (_like(s, scale, n, (groups,)) for n in (1, 0))
    epsilon = s.number("epsilon", 1e-5)
    even = s.op("InstanceNormalization", apart, ones, zeros, epsilon=epsilon)
    even = s.op("Reshape", even, s.op("Shape", image))
    axes = s.constant("axes", np.array([1, 2]))
    scaled = s.op("Mul", even, s.op("Unsqueeze", scale, axes))
    y = s.op("Add", scaled, s.op("Unsqueeze", shift, axes))
    y = s.op("Mul", y, s.op("Sigmoid", y)) if s.number("activation", 0) else y
    if last:
        s.op("Transpose", y, made=s.node.outputs[0], perm=(0, 2, 3, 1))
    else:
        s.op("Identity", y, made=s.node.outputs[0])


def _like(s: Spelled, value: str, number: float, sides: tuple[int, ...] = ()) -> str:
    """A constant in the element type of ``value``, which is not known yet."""
    label = f"number_{len(s.constants)}"
    return s.op("CastLike", s.constant(label, np.full(sides, number)), value)


SPELLINGS: Mapping[str, Callable[[Spelled], None]] = {
    "com.microsoft::BiasAdd": _bias_add,
    "com.microsoft::BiasSplitGelu": _bias_split_gelu,
    "com.microsoft::GemmFastGelu": _gemm_fast_gelu,
    "com.microsoft::GroupNorm": _group_norm,
    "com.microsoft::SkipGroupNorm": _skip_group_norm,
}
