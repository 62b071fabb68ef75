"""Determinants and triangles of matrices."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node

# Largest size for which cofactors are n² determinants, with n⁵ multiplications: a million for one
# matrix.
_LARGEST_OF_COFACTORS = 16
_INT64 = 7  # TensorProto.INT64


@vjp_rule("Trilu")
def triangle(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the same triangle of the cotangent."""
    return {0: b.op("Trilu", g[0], *node.inputs[1:], upper=integer(node, "upper", 1))}


@vjp_rule("Det")
def determinant(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the cofactors (Jacobi's formula)."""
    x, y = node.inputs[0], node.outputs[0]
    n, matrix = b.sample_shape(x)[-1], b.constant([-2, -1])
    if n == 1:
        return {0: b.reshape_like(g[0], x)}
    if n <= _LARGEST_OF_COFACTORS:
        return {0: b.op("Mul", b.op("Unsqueeze", g[0], matrix), _cofactors(b, x))}
    # The cofactors of a regular matrix are det(X) X⁻ᵀ. A singular matrix gives infinity or NaN.
    scaled = b.op("Unsqueeze", b.op("Mul", g[0], y), matrix)
    rank = b.rank(x)
    transposed = b.op("Transpose", x, perm=(*range(rank - 2), rank - 1, rank - 2))
    return {0: b.op("Mul", scaled, b.op("Inverse", transposed, domain="com.microsoft"))}


def _cofactors(b: VjpBuilder, x: str) -> str:
    rank, one = b.rank(x), b.constant(1)
    n = b.forward("Gather", b.shape(x), b.constant(rank - 1))[0]
    column = b.forward("Unsqueeze", _count(b, n), b.constant([1]))[0]
    shorter = _count(b, b.forward("Sub", n, one)[0])
    # Row i contains all numbers below n except i.
    behind = b.forward("GreaterOrEqual", shorter, column)[0]
    rest = b.forward("Add", shorter, b.forward("Cast", behind, to=_INT64)[0])[0]
    rows = b.op("Gather", x, rest, axis=rank - 2)
    minors = b.op("Gather", rows, rest, axis=rank)
    batch = range(rank - 2)
    minors = b.op("Transpose", minors, perm=(*batch, rank - 2, rank, rank - 1, rank + 1))
    # The signs alternate along both axes.
    place = b.forward("Mod", b.forward("Add", column, _count(b, n))[0], b.constant(2))[0]
    sign = b.forward("Sub", one, b.forward("Add", place, place)[0])[0]
    return b.op("Mul", b.op("Det", minors), b.cast_like(sign, x))


def _count(b: VjpBuilder, limit: str) -> str:
    return b.forward("Range", b.constant(0), limit, b.constant(1))[0]
