"""Running sums and products along an axis."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


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
