"""Trigonometric and hyperbolic functions and their inverses."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.elementwise import polynomial
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node

# -- circle ----------------------------------------------------------------------------------------


@vjp_rule("Sin")
def sin(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times cos x."""
    return {0: b.op("Mul", g[0], b.op("Cos", node.inputs[0]))}


@vjp_rule("Cos")
def cos(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times −sin x."""
    return {0: b.op("Neg", b.op("Mul", g[0], b.op("Sin", node.inputs[0])))}


@vjp_rule("Tan")
def tan(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times 1 + y²."""
    return {0: b.op("Mul", g[0], polynomial(b, node.outputs[0], (1, 0, 1)))}


@vjp_rule("Asin")
def asin(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by √(1 − x²)."""
    return {0: b.op("Div", g[0], b.op("Sqrt", _one_minus_square(b, node.inputs[0])))}


@vjp_rule("Acos")
def acos(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by −√(1 − x²)."""
    return {0: b.op("Neg", b.op("Div", g[0], b.op("Sqrt", _one_minus_square(b, node.inputs[0]))))}


@vjp_rule("Atan")
def atan(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by 1 + x²."""
    return {0: b.op("Div", g[0], polynomial(b, node.inputs[0], (1, 0, 1)))}


# -- hyperbola -------------------------------------------------------------------------------------


@vjp_rule("Sinh")
def sinh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times cosh x."""
    return {0: b.op("Mul", g[0], b.op("Cosh", node.inputs[0]))}


@vjp_rule("Cosh")
def cosh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times sinh x."""
    return {0: b.op("Mul", g[0], b.op("Sinh", node.inputs[0]))}


@vjp_rule("Asinh")
def asinh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by √(x² + 1)."""
    return {0: b.op("Div", g[0], b.op("Sqrt", polynomial(b, node.inputs[0], (1, 0, 1))))}


@vjp_rule("Acosh")
def acosh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by √(x² − 1)."""
    x = node.inputs[0]
    less, more = (b.op(op, x, b.scalar(1, x)) for op in ("Sub", "Add"))
    return {0: b.op("Div", g[0], b.op("Sqrt", b.op("Mul", less, more)))}


@vjp_rule("Atanh")
def atanh(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by 1 − x²."""
    return {0: b.op("Div", g[0], _one_minus_square(b, node.inputs[0]))}


def _one_minus_square(b: VjpBuilder, x: str) -> str:
    """Write (1 − x)(1 + x), which is accurate near one, unlike 1 − x²."""
    one = b.scalar(1, x)
    return b.op("Mul", b.op("Sub", one, x), b.op("Add", one, x))
