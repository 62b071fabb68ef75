"""Differentiates activation functions and softmax.

If the result determines the derivative, a rule reads the result and not the operand. The next layer
saves the result in any case, and ONNX Runtime can then fuse the activation with the operator before
it.
"""

from collections.abc import Mapping
from math import pi, sqrt

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, add_slopes, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, number, text
from kfac_engine.autodiff.rules.elementwise import polynomial
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import ModelError
from kfac_engine.graph.structure import Node

# Defaults of Selu, as ONNX states them.
_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
# Operators whose results contain the probabilities of their operand.
_RELAYS = frozenset({"Cast", "CastLike", "Identity"})


# -- piecewise linear ------------------------------------------------------------------------------


@vjp_rule("LeakyRelu")
def leaky_relu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent, times the slope where x ≤ 0."""
    x, alpha = node.inputs[0], number(node, "alpha", 0.01)
    slope = b.scalar(alpha, x)
    if 0 <= alpha <= 1:
        # A Clip is three times as fast as Where, which uses one thread.
        return {0: b.op("Mul", g[0], b.op("Clip", b.cast_like(_positive(b, x), x), slope))}
    return {0: b.op("Where", _positive(b, x), g[0], b.op("Mul", g[0], slope))}


@vjp_rule("PRelu")
def prelu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent, times the slope where x < 0; the slope receives g x there."""
    x, slope = node.inputs
    gradients = {}
    if 0 in wanted:
        gradients[0] = b.op("Where", _positive(b, x), g[0], b.op("Mul", g[0], slope))
    if 1 in wanted:
        wide = b.op("Mul", g[0], b.op("Min", x, b.scalar(0, x)))
        gradients[1] = b.unbroadcast(wide, node.outputs[0], slope)
    return gradients


@vjp_rule("Clip")
def clip(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Pass the cotangent to x inside the bounds, and to the bound elsewhere."""
    x, low, high = (*node.inputs, "", "")[:3]
    for bound in (low, high):
        if np.isnan(b.graph.constants.get(bound, 0)).any():
            raise ModelError(
                f"{node.op} at node '{node.name}' has NaN as the bound '{bound}', for which ONNX "
                f"defines no result; use a number, or leave the bound out."
            )
    # y = min(max(x, low), high), so an empty interval gives high.
    at_low = b.op("Less", x, low) if low else ""
    at_high = b.op("Greater", b.op("Max", x, low) if low else x, high) if high else ""
    cut = [mask for mask in (at_low, at_high) if mask]
    if not cut:
        return {0: g[0]}
    gradients = {}
    if 0 in wanted:
        inside = b.op("Not", b.op("Or", *cut) if len(cut) == 2 else cut[0])
        gradients[0] = b.op("Mul", g[0], b.cast_like(inside, x))
    if 1 in wanted:
        only_low = b.op("And", at_low, b.op("Not", at_high)) if high else at_low
        gradients[1] = _sum_where(b, only_low, g[0], low)
    if 2 in wanted:
        gradients[2] = _sum_where(b, at_high, g[0], high)
    return gradients


@vjp_rule("HardSigmoid")
def hard_sigmoid(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the slope where 0 < y < 1, else zero."""
    y = node.outputs[0]
    inside = b.op("And", _positive(b, y), b.op("Less", y, b.scalar(1, y)))
    slope = b.scalar(number(node, "alpha", 0.2), y)
    return {0: b.op("Mul", g[0], b.op("Mul", b.cast_like(inside, y), slope))}


# -- smooth ----------------------------------------------------------------------------------------


@vjp_rule("Elu")
def elu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient. The derivative is 1 for x > 0, else y + α."""
    return _exponential_unit(b, node, g[0], number(node, "alpha", 1.0), 1.0)


@vjp_rule("Selu")
def selu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient. The derivative is γ for x > 0, else y + γ α."""
    gamma = number(node, "gamma", _SELU_GAMMA)
    return _exponential_unit(b, node, g[0], gamma * number(node, "alpha", _SELU_ALPHA), gamma)


def _exponential_unit(
    b: VjpBuilder, node: Node, g: str, depth: float, slope: float
) -> Mapping[int, str]:
    """Return the gradient of slope·x for x > 0, else depth·(exp(x) − 1)."""
    x, y = node.inputs[0], node.outputs[0]
    left = b.op("Add", y, b.scalar(depth, x))
    return {0: b.op("Mul", g, b.op("Where", _positive(b, x), b.scalar(slope, x), left))}


@vjp_rule("Celu")
def celu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient. The derivative is 1 for x > 0, else 1 + y/α."""
    x, y = node.inputs[0], node.outputs[0]
    left = polynomial(b, y, (1, 1 / number(node, "alpha", 1.0)))
    return {0: b.op("Mul", g[0], b.op("Where", _positive(b, x), b.scalar(1, x), left))}


@vjp_rule("Gelu")
def gelu(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the slope of the exact form or of the form with tanh."""
    slope = {"none": _gelu_slope, "tanh": _gelu_tanh_slope}
    return {0: b.op("Mul", g[0], slope[text(node, "approximate", "none")](b, node))}


def _gelu_slope(b: VjpBuilder, node: Node) -> str:
    """Write Φ(x) + x φ(x), with the distribution function and density of the standard normal."""
    x = node.inputs[0]
    erf = b.op("Erf", b.op("Mul", x, b.scalar(sqrt(0.5), x)))
    distribution = b.op("Mul", b.op("Add", erf, b.scalar(1, x)), b.scalar(0.5, x))
    bell = b.op("Exp", polynomial(b, x, (0, 0, -0.5)))
    return b.op("Add", distribution, b.op("Mul", bell, polynomial(b, x, (0, 1 / sqrt(2 * pi)))))


def _gelu_tanh_slope(b: VjpBuilder, node: Node) -> str:
    """Write (1 + t)/2 + x t′/2 with t = tanh(√(2/π)(x + 0.044715 x³))."""
    x, c = node.inputs[0], sqrt(2 / pi)
    t = b.op("Tanh", polynomial(b, x, (0, c, 0, 0.044715 * c)))
    sech2 = b.op("Sub", b.scalar(1, x), b.op("Mul", t, t))
    half = b.op("Mul", b.op("Add", t, b.scalar(1, x)), b.scalar(0.5, x))
    # x u′/2 with the operand u of tanh
    ramp = polynomial(b, x, (0, c / 2, 0, 3 * 0.044715 * c / 2))
    return b.op("Add", half, b.op("Mul", sech2, ramp))


def _softsign(b: VjpBuilder, x: str, y: str) -> str:
    """Write (1 + |x|)²."""
    root = b.op("Add", b.op("Abs", x), b.scalar(1, x))
    return b.op("Mul", root, root)


def _hard_swish(b: VjpBuilder, x: str, y: str) -> str:
    """Write x/3 + 1/2 between −3 and 3, else a step."""
    bent = b.op("Less", b.op("Abs", x), b.scalar(3, x))
    outside = b.cast_like(_positive(b, x), x)
    return b.op("Where", bent, polynomial(b, x, (0.5, 1 / 3)), outside)


add_slopes({
    "Relu": ("Mul", lambda b, x, y: b.cast_like(_positive(b, y), y)),
    "HardSwish": ("Mul", _hard_swish),
    "Tanh": ("Mul", lambda b, x, y: polynomial(b, y, (1, 0, -1))),
    "Sigmoid": ("Mul", lambda b, x, y: polynomial(b, y, (0, 1, -1))),
    # This is sigmoid(x). Sigmoid of ONNX Runtime is off by 17 % at −15 in float32.
    "Softplus": ("Mul", lambda b, x, y: b.op("Exp", b.op("Sub", x, y))),
    "Softsign": ("Div", _softsign),
})  # fmt: skip


# -- softmax ---------------------------------------------------------------------------------------


@vjp_rule("Softmax")
def softmax(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return t − y Σ t with t = g y."""
    y = _defined(b, node.outputs[0])
    total = _sum_over_axis(b, node, b.op("Mul", g[0], y))
    return {0: b.op("Mul", y, b.op("Sub", g[0], total))}


@vjp_rule("LogSoftmax")
def log_softmax(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent minus exp(y) Σ g."""
    probabilities = b.op("Exp", node.outputs[0])
    return {0: b.op("Sub", g[0], b.op("Mul", probabilities, _sum_over_axis(b, node, g[0])))}


def _defined(b: VjpBuilder, y: str) -> str:
    """Write the probabilities ``y``, with zero for NaN if the model replaces these entries."""
    # A row of NaN is 0/0. The cotangent of a replaced entry is zero, but zero times NaN is NaN.
    return b.op("Where", b.op("IsNaN", y), b.scalar(0, y), y) if _is_selected(b, y) else y


def _is_selected(b: VjpBuilder, value: str) -> bool:
    relayed = [value]
    for name in relayed:  # the loop appends to the list
        readers = b.graph.consumers.get(name, ())
        if any(reader.op == "Where" for reader, _ in readers):
            return True
        # Only the first operand is relayed, so that no value is met twice.
        relayed += [r.outputs[0] for r, index in readers if r.op in _RELAYS and index == 0]
    return False


def _sum_over_axis(b: VjpBuilder, node: Node, value: str) -> str:
    axis, rank = integer(node, "axis", -1), b.rank(node.inputs[0])
    # ONNX Runtime refuses others, but reads 32 bits only: -2**63 is the axis 0.
    if not -rank <= axis < rank:
        raise ModelError(
            f"{node.op} at node '{node.name}' has the axis {axis}, but its operand "
            f"'{node.inputs[0]}' has the axes {-rank} to {rank - 1}; use one of these."
        )
    return b.op("ReduceSum", value, b.constant([axis]), keepdims=1)


# -- pieces ----------------------------------------------------------------------------------------


def _positive(b: VjpBuilder, x: str) -> str:
    return b.op("Greater", x, b.scalar(0, x))


def _sum_where(b: VjpBuilder, mask: str, g: str, bound: str) -> str:
    """Write the gradient of a bound of Clip: the sum of ``g`` where the result is the bound."""
    total = b.op("ReduceSum", b.op("Where", mask, g, b.scalar(0, bound)), keepdims=0)
    return b.reshape_like(total, bound)
