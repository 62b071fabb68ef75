"""Differentiates reductions over axes, and running sums and products."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import Node


@dataclass(frozen=True, slots=True)
class _Reduction:
    """The names of operands and cotangent of a reduction."""

    x: str  # operand of the reduction
    y: str  # result, with the reduced axes as axes of size one
    g: str  # cotangent of the result, with the same axes
    axes: str  # reduced axes, int64


def _reduction(b: VjpBuilder, node: Node, g: Cotangents) -> _Reduction:
    x, y = node.inputs[0], node.outputs[0]
    axes_operand = node.operand(1)
    if axes_operand and b.sample_shape(axes_operand) != (0,):
        axes = axes_operand
    elif integer(node, "noop_with_empty_axes", 0) == 1:
        if node.op not in _IDENTITIES_OVER_NO_AXES:
            raise UnsupportedOpError(
                f"node '{node.name}' reduces with {node.op} over no axes, which ONNX defines in "
                f"two ways; replace the node by elementwise operators."
            )
        axes = b.constant([], "int64")
    else:
        axes = b.constant(range(b.rank(x)), "int64")
    keeps_axes = integer(node, "keepdims", 1) == 1 or b.rank(y) == b.rank(x)
    if keeps_axes:
        return _Reduction(x, y, g[0], axes)
    return _Reduction(x, b.op("Unsqueeze", y, axes), b.op("Unsqueeze", g[0], axes), axes)


# Operators that return their operand if they reduce over no axes.
_IDENTITIES_OVER_NO_AXES = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


@vjp_rule("ReduceMean")
def reduce_mean(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by the number of entries."""
    r = _reduction(b, node, g)
    every = range(b.rank(r.x)), range(b.rank(node.outputs[0]))
    elements, results = b.count(r.x, every[0]), b.count(node.outputs[0], every[1])
    share = b.op("Div", r.g, b.op("Div", elements, results))
    return {0: b.op("Expand", share, b.shape(r.x))}


def _extremum(b: VjpBuilder, r: _Reduction) -> str:
    """Return the cotangent, divided among equal extrema."""
    chosen = b.cast_like(b.op("Equal", r.x, r.y), r.x)
    ties = b.op("ReduceSum", chosen, r.axes, keepdims=1, noop_with_empty_axes=1)
    return b.op("Mul", chosen, b.op("Div", r.g, ties))


def _product(b: VjpBuilder, r: _Reduction) -> str:
    """Return the cotangent times the product of the *other* entries, which may contain zeros."""
    zero, one = b.scalar(0, r.x), b.scalar(1, r.x)
    is_zero = b.op("Equal", r.x, zero)
    filled = b.op("Where", is_zero, one, r.x)
    rest = b.op("ReduceProd", filled, r.axes, keepdims=1, noop_with_empty_axes=1)
    as_number = b.cast_like(is_zero, r.x)
    zeros = b.op("ReduceSum", as_number, r.axes, keepdims=1, noop_with_empty_axes=1)
    # If one entry is zero, only its derivative is nonzero. If two entries are zero, all are zero.
    none_else = b.cast_like(b.op("Equal", zeros, as_number), r.x)
    return b.op("Mul", r.g, b.op("Mul", none_else, b.op("Div", rest, filled)))


def _norm(b: VjpBuilder, r: _Reduction) -> str:
    """Return the cotangent times x/|x|, or the subgradient zero where the norm is zero."""
    at_kink = b.op("Equal", r.y, b.scalar(0, r.x))
    norm = b.op("Where", at_kink, b.scalar(1, r.x), r.y)
    return b.op("Mul", b.op("Div", r.g, norm), r.x)


def _log_sum(b: VjpBuilder, r: _Reduction) -> str:
    """Return the cotangent divided by the sum exp(y)."""
    share = b.op("Mul", r.g, b.op("Exp", b.op("Neg", r.y)))
    return b.op("Expand", share, b.shape(r.x))


# Operator to the function that writes the cotangent of the operand.
_COTANGENTS: Mapping[str, Callable[[VjpBuilder, _Reduction], str]] = {
    "ReduceSum": lambda b, r: b.op("Expand", r.g, b.shape(r.x)),
    "ReduceMax": _extremum,
    "ReduceMin": _extremum,
    "ReduceProd": _product,
    "ReduceL1": lambda b, r: b.op("Mul", r.g, b.op("Sign", r.x)),
    "ReduceL2": _norm,
    "ReduceSumSquare": lambda b, r: b.op("Mul", b.op("Mul", r.g, b.scalar(2, r.x)), r.x),
    "ReduceLogSum": _log_sum,
    # exp(x − y) is the softmax of x.
    "ReduceLogSumExp": lambda b, r: b.op("Mul", r.g, b.op("Exp", b.op("Sub", r.x, r.y))),
}


@vjp_rule(*_COTANGENTS)
def reduce(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of the operand of a reduction."""
    return {0: _COTANGENTS[node.op](b, _reduction(b, node, g))}


# -- running sums and products ---------------------------------------------------------------------


@vjp_rule("CumSum")
def cumulative_sum(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the running sum of the cotangent, from the other end."""
    return {0: _from_the_other_end(b, node, g[0])}


@vjp_rule("CumProd")
def cumulative_product(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the sum of g times the other factors, over all results with the entry as factor."""
    # For a nonzero entry x, the other factors are y/x. Of the zeros in a line, only the first has a
    # nonzero derivative, because every result with a later zero as factor has the first zero as
    # factor, too.
    x, axis = node.inputs
    exclusive, reverse = integer(node, "exclusive", 0), integer(node, "reverse", 0)
    zero, one = b.scalar(0, x), b.scalar(1, x)
    is_zero = b.op("Equal", x, zero)
    as_number = b.cast_like(is_zero, x)
    filled = b.op("Where", is_zero, one, x)
    # The number of zeros among the factors of a result, and the number of zeros up to and including
    # an entry.
    inside = b.op("CumSum", as_number, axis, exclusive=exclusive, reverse=reverse)
    seen = b.op("CumSum", as_number, axis, reverse=reverse)
    others = b.op("CumProd", filled, axis, exclusive=exclusive, reverse=reverse)
    none_inside, one_inside = (
        b.cast_like(b.op("Equal", inside, value), x) for value in (zero, one)
    )
    first = b.op("And", is_zero, b.op("Equal", seen, one))
    gy = b.op("Mul", g[0], others)
    off_zero = _from_the_other_end(b, node, b.op("Mul", gy, none_inside))
    at_zero = _from_the_other_end(b, node, b.op("Mul", gy, one_inside))
    rest = b.op("Where", is_zero, zero, b.op("Div", off_zero, filled))
    return {0: b.op("Where", first, at_zero, rest)}


def _from_the_other_end(b: VjpBuilder, node: Node, value: str) -> str:
    return b.op(
        "CumSum", value, node.inputs[1], exclusive=integer(node, "exclusive", 0),
        reverse=1 - integer(node, "reverse", 0),
    )  # fmt: skip
