"""Differentiates elementwise operators, such as arithmetic, powers and trigonometry."""

from collections.abc import Sequence

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, add_slopes, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import RELAYS, Node

_TWO_OVER_ROOT_PI = 1.1283791670955126


# -- two operands and more -------------------------------------------------------------------------


@vjp_rule("Add", "Sum")
def add(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent of the sum for every operand."""
    return _each(b, node, dict.fromkeys(wanted, g[0]))


@vjp_rule("Mean")
def mean(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by the number of operands, for every operand."""
    share = b.op("Mul", g[0], b.scalar(1 / len(node.inputs), node.outputs[0]))
    return _each(b, node, dict.fromkeys(wanted, share))


@vjp_rule("Sub")
def sub(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent and its negative."""
    parts = _each(b, node, dict.fromkeys(wanted, g[0]))
    return {i: b.op("Neg", part) if i == 1 else part for i, part in parts.items()}


@vjp_rule("Mul")
def mul(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the other operand."""
    return _each(b, node, {i: b.op("Mul", g[0], node.inputs[1 - i]) for i in wanted})


@vjp_rule("Div")
def div(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return q and −q y with q = g/x₁."""
    quotient = b.op("Div", g[0], node.inputs[1])
    wide = {0: quotient}
    if 1 in wanted:
        wide[1] = b.op("Neg", b.op("Mul", quotient, node.outputs[0]))
    return _each(b, node, {i: wide[i] for i in wanted})


@vjp_rule("Pow")
def power(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradients of y = x^p: g p x^(p−1) for the base x, g y log x for the exponent p."""
    x, p = node.inputs
    wide = {}
    if 0 in wanted and _is_constant(b, p, 2):
        # As in each normalization of a language model, where x¹ would take as long as a product.
        wide[0] = b.op("Mul", g[0], b.op("Add", x, x))
    elif 0 in wanted:
        exponent = b.cast_like(p, x) if b.dtype(p) != b.dtype(x) else p
        zero, one = b.scalar(0, x), b.scalar(1, x)
        # The derivative for exponent zero is 0·x, not 0·x⁻¹, which is undefined at x = 0.
        lowered = b.op("Where", b.op("Equal", exponent, zero), one, b.op("Sub", exponent, one))
        base = _apart_from_zero(b, x, x) if _is_constant(b, p, 0.5) else x
        slope = b.op("Mul", exponent, b.op("Pow", base, lowered))
        wide[0] = b.op("Mul", g[0], slope)
    if 1 in wanted:
        # At x = 0, x^p does not depend on p. For x < 0, it is not defined for all real p.
        positive = b.op("Greater", x, b.scalar(0, x))
        logarithm = b.op("Log", b.op("Where", positive, x, b.scalar(1, x)))
        wide[1] = b.op("Mul", g[0], b.op("Mul", node.outputs[0], logarithm))
    return _each(b, node, wide)


@vjp_rule("Max", "Min")
def extremum(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Pass the cotangent to the selected operand."""
    y = node.outputs[0]
    chosen = [b.cast_like(b.op("Equal", x, y), y) for x in node.inputs]
    # The cotangent is divided among equal operands.
    share = b.op("Div", g[0], b.op("Sum", *chosen)) if len(chosen) > 1 else g[0]
    return _each(b, node, {i: b.op("Mul", share, chosen[i]) for i in wanted})


@vjp_rule("Mod")
def modulo(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent and −q times the cotangent, for y = x₀ − q x₁ with an integer q."""
    dividend, divisor = node.inputs
    wide = {0: g[0]}
    if 1 in wanted:
        # The remainder gives the exact q. The quotient x₀/x₁ may be rounded up to an integer.
        rest = b.op("Sub", dividend, node.outputs[0])
        quotient = b.op("Round", b.op("Div", rest, divisor))
        wide[1] = b.op("Neg", b.op("Mul", g[0], quotient))
    return _each(b, node, {i: wide[i] for i in wanted})


@vjp_rule("Where")
def where(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Pass the cotangent to the selected operand."""
    condition, y = node.inputs[0], node.outputs[0]
    zero = b.scalar(0, y)
    branches = {1: (g[0], zero), 2: (zero, g[0])}
    return _each(b, node, {i: b.op("Where", condition, *branches[i]) for i in wanted})


def _each(b: VjpBuilder, node: Node, wide: dict[int, str]) -> Gradients:
    """Sum cotangents in the shape of the result to the shapes of the operands."""
    y = node.outputs[0]
    return {i: b.unbroadcast(name, y, node.inputs[i]) for i, name in wide.items()}


# -- one operand -----------------------------------------------------------------------------------


@vjp_rule("Neg")
def neg(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the negated cotangent."""
    return {0: b.op("Neg", g[0])}


@vjp_rule("Sqrt")
def sqrt(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent divided by 2 y."""
    y = node.outputs[0]
    half = b.op("Mul", g[0], b.scalar(0.5, y))
    return {0: b.op("Div", half, _apart_from_zero(b, y, node.inputs[0]))}


# Largest number of nested sums of a norm.
_DEEPEST_SUM = 4


def _apart_from_zero(b: VjpBuilder, value: str, square: str) -> str:
    """Return a value whose zeros are replaced by one, if ``square`` is a sum of squares.

    The derivative of the root is then finite where all squares are zero. The squares have the
    derivative zero there, so the norm has the subgradient zero.
    """
    if not _is_squared_norm(b, square, _DEEPEST_SUM):
        return value
    at_kink = b.op("Equal", value, b.scalar(0, value))
    return b.op("Where", at_kink, b.scalar(1, value), value)


def _is_squared_norm(b: VjpBuilder, name: str, depth: int) -> bool:
    """Return whether a value is a square or a sum of squares, or one of them times a number."""
    node = b.graph.producers.get(name)
    while node is not None and (node.op in RELAYS or node.op in _OF_SQUARES):
        if node.op == "ReduceSumSquare":
            return True
        node = b.graph.producers.get(node.inputs[0])
    if node is None or node.domain or not depth:
        return False
    if node.op == "Add":
        return all(_is_squared_norm(b, part, depth - 1) for part in node.inputs)
    if node.op == "Pow":
        return _is_constant(b, node.inputs[1], 2)
    if node.op not in ("Mul", "Div"):
        return False
    x, y = node.inputs
    if node.op == "Mul" and x == y:
        return True
    scaled = {0: y, 1: x} if node.op == "Mul" else {1: x}
    return any(
        set(b.sample_shape(node.inputs[number])) <= {1} and _is_squared_norm(b, rest, depth - 1)
        for number, rest in scaled.items()
    )


_OF_SQUARES = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare"})


def _is_constant(b: VjpBuilder, name: str, number: float) -> bool:
    array = b.graph.constants.get(name)
    return array is not None and array.size == 1 and array.item() == number


def polynomial(b: VjpBuilder, x: str, coefficients: Sequence[float]) -> str:
    """Write a polynomial of ``x`` by Horner's rule, with coefficients of ascending powers."""
    *lower, last = coefficients
    result = b.scalar(last, x)
    for coefficient in reversed(lower):
        result = b.op("Mul", result, x)
        if coefficient:
            result = b.op("Add", result, b.scalar(coefficient, x))
    return result


def _bell(b: VjpBuilder, x: str, y: str) -> str:
    """Write 2/√π exp(−x²)."""
    bell = b.op("Exp", b.op("Neg", b.op("Mul", x, x)))
    return b.op("Mul", bell, b.scalar(_TWO_OVER_ROOT_PI, x))


def _root_of_square_minus_one(b: VjpBuilder, x: str, y: str) -> str:
    less, more = (b.op(op, x, b.scalar(1, x)) for op in ("Sub", "Add"))
    return b.op("Sqrt", b.op("Mul", less, more))


def _one_minus_square(b: VjpBuilder, x: str, y: str) -> str:
    """Write (1 − x)(1 + x), which is accurate near one, unlike 1 − x²."""
    one = b.scalar(1, x)
    return b.op("Mul", b.op("Sub", one, x), b.op("Add", one, x))


def _one_plus_square(b: VjpBuilder, x: str) -> str:
    return polynomial(b, x, (1, 0, 1))


# Operator to its derivative: an operand of the product with the cotangent, or of the quotient. It
# is written from the operand x and the result y.
add_slopes({
    "Abs": ("Mul", lambda b, x, y: b.op("Sign", x)),  # zero at the kink
    "Exp": ("Mul", lambda b, x, y: y),
    "Log": ("Div", lambda b, x, y: x),
    "Reciprocal": ("-Mul", lambda b, x, y: b.op("Mul", y, y)),
    "Erf": ("Mul", _bell),
    "Sin": ("Mul", lambda b, x, y: b.op("Cos", x)),
    "Cos": ("-Mul", lambda b, x, y: b.op("Sin", x)),
    "Tan": ("Mul", lambda b, x, y: _one_plus_square(b, y)),
    "Asin": ("Div", lambda b, x, y: b.op("Sqrt", _one_minus_square(b, x, y))),
    "Acos": ("-Div", lambda b, x, y: b.op("Sqrt", _one_minus_square(b, x, y))),
    "Atan": ("Div", lambda b, x, y: _one_plus_square(b, x)),
    "Sinh": ("Mul", lambda b, x, y: b.op("Cosh", x)),
    "Cosh": ("Mul", lambda b, x, y: b.op("Sinh", x)),
    "Asinh": ("Div", lambda b, x, y: b.op("Sqrt", _one_plus_square(b, x))),
    "Acosh": ("Div", _root_of_square_minus_one),
    "Atanh": ("Div", _one_minus_square),
})  # fmt: skip


# -- stored integers times a real scale ------------------------------------------------------------


@vjp_rule("DequantizeLinear")
def dequantize(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of the scale in y = (x − zero point) · scale: a sum over entries."""
    x, scale, *zero_point = node.inputs
    # With a scale of one, the operator returns the integers.
    one = b.forward("Expand", b.scalar(1, scale), b.shape(scale))
    whole = b.repeat(node, x, one, *zero_point)[0]
    wide = b.cast_like(b.op("Mul", g[0], whole), scale)
    if b.rank(scale) == 0 or (b.rank(scale) == 1 and b.sample_shape(scale) == (1,)):
        return {1: b.reshape_like(b.op("ReduceSum", wide, keepdims=0), scale)}
    axis = integer(node, "axis", 1) % b.rank(x)
    if b.rank(scale) == 1:
        others = [other for other in range(b.rank(x)) if other != axis]
        return {1: b.op("ReduceSum", wide, b.constant(others, "int64"), keepdims=0)}
    return {1: _sum_of_blocks(b, wide, x, axis, integer(node, "block_size", 1))}


def _sum_of_blocks(b: VjpBuilder, wide: str, x: str, axis: int, block: int) -> str:
    """Write sums over blocks along an axis of ``x``; the last block may be shorter."""
    side = b.forward("Gather", b.shape(x), b.constant([axis]))
    missing = b.forward("Mod", b.forward("Neg", side), b.constant([block]))
    pads = b.forward("Concat", b.constant([0]), missing, axis=0)
    whole = b.pad(wide, pads, b.constant([axis]), b.rank(x))
    before, after = (
        b.forward("Gather", b.shape(x), b.constant(axes, "int64"))
        for axes in (range(axis), range(axis + 1, b.rank(x)))
    )
    shape = b.forward("Concat", before, b.constant([-1, block]), after, axis=0)
    return b.op("ReduceSum", b.op("Reshape", whole, shape), b.constant([axis + 1]), keepdims=0)
