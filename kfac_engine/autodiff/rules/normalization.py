"""Differentiates normalizations over a batch, example or group, or with running statistics.

One formula covers all normalizations except BatchNormalization in the form of inference. Let h = (x
− m)/σ over some axes, where σ² = v + ε and m, v are mean and variance over these axes. With gh as
the cotangent of h::

    gx = (gh − mean(gh) − h · mean(gh · h)) / σ
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, number
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.analysis.normalized import before_scale
from kfac_engine.graph.structure import Node


@dataclass(frozen=True, slots=True)
class _Standardised:
    """Names of values: h (``value``), 1/σ (``inverse``) and the axes of the means (``axes``)."""

    value: str
    inverse: str
    axes: str


def _standardise(b: VjpBuilder, x: str, axes: Sequence[int], epsilon: str) -> _Standardised:
    over = b.constant(axes)
    centred = b.op("Sub", x, b.op("ReduceMean", x, over, keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), over, keepdims=1)
    inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", variance, epsilon)))
    return _Standardised(b.op("Mul", centred, inverse), inverse, over)


def _destandardise(b: VjpBuilder, h: _Standardised, gh: str, slope: str = "") -> str:
    """Write gx by the formula of this module; ``slope`` is mean(gh · h) if known."""
    mean = b.op("ReduceMean", gh, h.axes, keepdims=1)
    slope = slope or b.op("ReduceMean", b.op("Mul", gh, h.value), h.axes, keepdims=1)
    rest = b.op("Sub", b.op("Sub", gh, mean), b.op("Mul", h.value, slope))
    return b.op("Mul", rest, h.inverse)


@vjp_rule("LayerNormalization")
def layer_normalization(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of a normalization over the last axes, and of its Mean and InvStdDev."""
    x, scale = node.inputs[:2]
    first = integer(node, "axis", -1) % b.rank(x)
    axes = range(first, b.rank(x))
    h = _as_computed(b, node, axes)
    along = b.op("Mul", g[0], h.value) if 0 in g else ""
    gradients = {}
    if 0 in wanted:
        parts = [_of_value(b, node, h, g[0], along)] if 0 in g else []
        # The statistics may be float32 although x is float64.
        statistics = {i: b.cast_like(g[i], x) for i in (1, 2) if i in g}
        parts += [_of_statistic(b, h, i, s, b.count(x, axes)) for i, s in statistics.items()]
        shaped = b.op("Sum", *parts) if len(parts) > 1 else parts[0]
        gradients[0] = shaped if 0 in g else b.op("Expand", shaped, b.shape(x))
    if 1 in wanted and 0 in g:
        gradients[1] = b.unbroadcast(along, x, scale)
    if 2 in wanted and 0 in g:
        gradients[2] = b.unbroadcast(g[0], x, node.inputs[2])
    return gradients


def _as_computed(b: VjpBuilder, node: Node, axes: Sequence[int]) -> _Standardised:
    """Return h and 1/σ of the forward pass, recomputed for float64 because 1/σ is rounded."""
    x, scale, shift = (*node.inputs, "")[:3]
    if b.dtype(x) != np.float32:
        return _standardise(b, x, axes, _epsilon(b, node))
    core, constants = before_scale(
        node, b.dtype(scale), b.sample_shape(scale), b.sample_shape(shift) if shift else ()
    )
    b.append(core, constants)
    return _Standardised(core.outputs[0], core.outputs[2], b.constant(axes))


def _of_value(b: VjpBuilder, node: Node, h: _Standardised, g: str, along: str) -> str:
    """Write the gradient of the first output, with ``along`` = g h."""
    x, scale = node.inputs[:2]
    gh = b.op("Mul", g, scale)
    shape = b.sample_shape(scale)
    if integer(node, "axis", -1) % b.rank(x) != b.rank(x) - 1 or shape != b.sample_shape(x)[-1:]:
        return _destandardise(b, h, gh)
    # The mean of gh h is a product of ``along`` and the scale.
    share = b.op("Mul", scale, b.scalar(1 / shape[0], x))
    slope = b.op("MatMul", along, b.op("Unsqueeze", share, b.constant([1])))
    return _destandardise(b, h, gh, slope)


def _of_statistic(b: VjpBuilder, h: _Standardised, output: int, g: str, count: str) -> str:
    """Write the gradient of output 1 (Mean) or 2 (InvStdDev, with the derivative −h/(n σ²))."""
    share = b.op("Div", g, count)
    if output == 1:
        return share
    slope = b.op("Mul", h.value, b.op("Mul", h.inverse, h.inverse))
    return b.op("Neg", b.op("Mul", share, slope))


@vjp_rule("InstanceNormalization")
def instance_normalization(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of a normalization over the pixels of each example and channel."""
    return _channelwise(b, node, g[0], range(2, b.rank(node.inputs[0])), wanted)


@vjp_rule("GroupNormalization")
def group_normalization(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of a normalization over each group of channels and its pixels."""
    x, scale = node.inputs[:2]
    groups = b.constant([0, integer(node, "num_groups", 1), -1])
    # Before operator set 21 each group has one scale, so groups replace channels.
    per_group = b.graph.opset < _SCALE_PER_CHANNEL
    shape, rank = (groups, 3) if per_group else (b.shape(x), b.rank(x))
    h = _standardise(b, b.op("Reshape", x, groups), (2,), _epsilon(b, node))
    gy = b.op("Reshape", g[0], shape)
    gradients = {}
    if 0 in wanted:
        gh = b.op("Reshape", b.op("Mul", gy, _per_channel(b, scale, rank)), groups)
        gradients[0] = b.reshape_like(_destandardise(b, h, gh), x)
    if 1 in wanted:
        scaled = b.op("Reshape", h.value, shape)
        gradients[1] = _sum_channels(b, b.op("Mul", gy, scaled), rank)
    if 2 in wanted:
        gradients[2] = _sum_channels(b, gy, rank)
    return gradients


_SCALE_PER_CHANNEL = 21


@vjp_rule("LpNormalization")
def lp_normalization(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return (g − s′ Σ g y)/s for y = x/s with a norm s; zero if s is zero."""
    x, y = node.inputs[0], node.outputs[0]
    axis = b.constant([integer(node, "axis", -1)])
    reduction, slope = _NORMS[integer(node, "p", 2)]
    norm = b.op(reduction, x, axis, keepdims=1)
    at_zero = b.op("Equal", norm, b.scalar(0, x))
    along = b.op("ReduceSum", b.op("Mul", g[0], y), axis, keepdims=1)
    rest = b.op("Sub", g[0], b.op("Mul", slope(b, x, y), along))
    finite = b.op("Where", at_zero, b.scalar(1, x), norm)
    return {0: b.op("Where", at_zero, b.scalar(0, x), b.op("Div", rest, finite))}


# The operator of the norm of each order, and the slope s′ = sign(x) or y from operand and result.
_NORMS: Mapping[int, tuple[str, Callable[[VjpBuilder, str, str], str]]] = {
    1: ("ReduceL1", lambda b, x, y: b.op("Sign", x)),
    2: ("ReduceL2", lambda b, x, y: y),
}


@vjp_rule("LRN")
def local_response_normalization(
    b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted
) -> Gradients:
    """Return g s^(−β) − 2αβ x mean(g y/s) for y = x s^(−β), s = bias + α mean(x²)."""
    x, y = node.inputs[0], node.outputs[0]
    alpha, beta = number(node, "alpha", 1e-4), number(node, "beta", 0.75)
    # ONNX Runtime accepts odd sizes only, so the window of a channel contains exactly the channels
    # whose windows contain it.
    size = integer(node, "size", 1)
    mean = _mean_of_channels(b, b.op("Mul", x, x), x, size)
    s = b.op("Mul", mean, b.scalar(alpha, x))
    s = b.op("Add", s, b.scalar(number(node, "bias", 1.0), x))
    direct = b.op("Mul", g[0], b.op("Pow", s, b.scalar(-beta, x)))
    through = b.op("Div", b.op("Mul", g[0], y), s)
    nearby = _mean_of_channels(b, through, x, size)
    steep = b.op("Mul", b.op("Mul", x, b.scalar(2 * alpha * beta, x)), nearby)
    return {0: b.op("Sub", direct, steep)}


def _mean_of_channels(b: VjpBuilder, value: str, x: str, size: int) -> str:
    """Write the means over windows of channels with zero padding, in the shape of ``x``."""
    channels = b.forward("Gather", b.shape(x), b.constant([1]))
    shape = b.forward("Concat", b.constant([0, 1]), channels, b.constant([-1]), axis=0)
    half = size // 2
    mean = b.op(
        "AveragePool", b.op("Reshape", value, shape), kernel_shape=(size, 1),
        pads=(half, 0, half, 0), count_include_pad=1,
    )  # fmt: skip
    return b.reshape_like(mean, x)


@vjp_rule("BatchNormalization")
def batch_normalization(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of a normalization of each channel, by batch or running statistics."""
    if not integer(node, "training_mode", 0):
        return _running_statistics(b, node, g[0], wanted)
    if set(g) != {0}:
        raise UnsupportedOpError(
            f"BatchNormalization in training mode at node '{node.name}' can be differentiated "
            f"through its first output only; use a loss without the running statistics."
        )
    x = node.inputs[0]
    axes = [axis for axis in range(b.rank(x)) if axis != 1]
    return _channelwise(b, node, g[0], axes, wanted)


def _channelwise(
    b: VjpBuilder, node: Node, g: str, axes: Sequence[int], wanted: Wanted
) -> Gradients:
    """Return the gradients of y = scale · h + shift with a scale and a shift for each channel."""
    # A scale is constant along the axes, so the formula of this module becomes gx = scale (g −
    # mean(g) − h mean(g h)) / σ. The gradients of scale and shift use the same means.
    x, scale = node.inputs[:2]
    rank, over = b.rank(x), b.constant(axes)
    h = _standardise(b, x, axes, _epsilon(b, node))
    mean = b.op("ReduceMean", g, over, keepdims=1)
    along = b.op("ReduceMean", b.op("Mul", g, h.value), over, keepdims=1)
    gradients = {}
    if 0 in wanted:
        rest = b.op("Sub", b.op("Sub", g, mean), b.op("Mul", h.value, along))
        steep = b.op("Mul", h.inverse, _per_channel(b, scale, rank))
        gradients[0] = b.op("Mul", rest, steep)
    for index, share in ((1, along), (2, mean)):
        if index in wanted:
            gradients[index] = _sum_channels(b, b.op("Mul", share, b.count(x, axes)), rank)
    return gradients


def _running_statistics(b: VjpBuilder, node: Node, g: str, wanted: Wanted) -> Gradients:
    """Return the gradients of the inference form, also of computed means and variances."""
    x, scale, _, mean, variance = node.inputs
    inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", variance, _epsilon(b, node))))
    slope = b.op("Mul", scale, inverse)
    gradients = {}
    if 0 in wanted:
        gradients[0] = b.op("Mul", g, _per_channel(b, slope, b.rank(x)))
    if wanted & {2, 3}:
        total = _sum_channels(b, g, b.rank(x))
        gradients[2] = total
        gradients[3] = b.op("Neg", b.op("Mul", total, slope))
    if wanted & {1, 4}:
        centred = b.op("Sub", x, _per_channel(b, mean, b.rank(x)))
        steep = b.op("Mul", _sum_channels(b, b.op("Mul", g, centred), b.rank(x)), inverse)
        gradients[1] = steep
        half = b.op("Mul", b.op("Mul", slope, inverse), b.scalar(-0.5, x))
        gradients[4] = b.op("Mul", steep, half)
    return gradients


def _per_channel(b: VjpBuilder, value: str, rank: int) -> str:
    """Write a vector over channels in a shape that broadcasts to images of ``rank`` axes."""
    return value if rank == 2 else b.op("Unsqueeze", value, b.constant(range(1, rank - 1)))


def _sum_channels(b: VjpBuilder, value: str, rank: int) -> str:
    """Write the sum over all axes except the axis of the channels."""
    axes = [axis for axis in range(rank) if axis != 1]
    return b.op("ReduceSum", value, b.constant(axes), keepdims=0)


def _epsilon(b: VjpBuilder, node: Node) -> str:
    return b.scalar(number(node, "epsilon", 1e-5), node.inputs[0])
