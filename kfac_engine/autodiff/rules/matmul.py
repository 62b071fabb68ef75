"""Matrix products.

Two-dimensional products are written as Gemm, which transposes operands without a copy.
"""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, number
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


@vjp_rule("Gemm")
def gemm(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return products with the transposed other operand, and a sum over rows for C."""
    A, B = node.inputs[:2]
    alpha, beta = number(node, "alpha", 1.0), number(node, "beta", 1.0)
    # A nonzero attribute transposes the operand.
    ta, tb = (int(integer(node, flag, 0) != 0) for flag in ("transA", "transB"))
    gradients = {}
    if 0 in wanted:
        left, right, t_left, t_right = (B, g[0], tb, 1) if ta else (g[0], B, 0, 1 - tb)
        gradients[0] = b.op("Gemm", left, right, transA=t_left, transB=t_right, alpha=alpha)
    if 1 in wanted:
        left, right, t_left, t_right = (g[0], A, 1, ta) if tb else (A, g[0], 1 - ta, 0)
        gradients[1] = b.op("Gemm", left, right, transA=t_left, transB=t_right, alpha=alpha)
    if 2 in wanted:
        y = node.outputs[0]
        scaled = g[0] if beta == 1 else b.op("Mul", g[0], b.scalar(beta, y))
        gradients[2] = b.unbroadcast(scaled, y, node.inputs[2])
    return gradients


@vjp_rule("MatMul")
def matmul(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return products of the cotangent and the transposed other operand."""
    A, B = node.inputs
    left, right = _PRODUCTS[b.rank(A) == 1, b.rank(B) == 1]
    gradients = {}
    if 0 in wanted:
        gradients[0] = left(b, node, g[0])
    if 1 in wanted:
        gradients[1] = right(b, node, g[0])
    return gradients


def _left_matrix(b: VjpBuilder, node: Node, g: str) -> str:
    """Write G Bᵀ, summed over the batch axes that A does not have."""
    A, B = node.inputs
    if b.rank(A) == b.rank(B) == 2:
        return b.op("Gemm", g, B, transB=1)
    if b.rank(A) == 2:
        # One large product replaces a batch of products and their sum.
        return b.op("Gemm", _columns(b, g, b.rank(B)), _columns(b, B, b.rank(B)), transB=1)
    product = b.op("MatMul", g, _swap_last(b, B, b.rank(B)))
    return b.unbroadcast(product, node.outputs[0], A)


def _right_matrix(b: VjpBuilder, node: Node, g: str) -> str:
    """Write Aᵀ G, summed over the batch axes that B does not have."""
    A, B = node.inputs
    rank = b.rank(A)
    if b.rank(B) == 2:
        return b.op("Gemm", _rows(b, A, rank), _rows(b, g, rank), transA=1)
    product = b.op("MatMul", _swap_last(b, A, rank), g)
    return b.unbroadcast(product, node.outputs[0], B)


def _left_of_vector(b: VjpBuilder, node: Node, g: str) -> str:
    """Write the outer product of g and v for each matrix of A, where y = A v."""
    return b.op("Mul", b.op("Unsqueeze", g, b.constant([-1])), node.inputs[1])


def _vector_on_right(b: VjpBuilder, node: Node, g: str) -> str:
    """Write Aᵀ g, summed over all rows of all matrices, where y = A v."""
    A, v = node.inputs
    row = b.op("Reshape", g, b.constant([1, -1]))
    return b.reshape_like(b.op("MatMul", row, _rows(b, A, b.rank(A))), v)


def _right_of_vector(b: VjpBuilder, node: Node, g: str) -> str:
    """Write the outer product of v and g for each matrix of B, where y = v B."""
    v = b.op("Unsqueeze", node.inputs[0], b.constant([1]))
    return b.op("Mul", v, b.op("Unsqueeze", g, b.constant([-2])))


def _vector_on_left(b: VjpBuilder, node: Node, g: str) -> str:
    """Write B g, summed over all matrices, where y = v B."""
    v, B = node.inputs
    product = b.op("MatMul", B, b.op("Unsqueeze", g, b.constant([-1])))
    batch = b.constant(range(b.rank(B) - 2))
    total = b.op("ReduceSum", product, batch, keepdims=0) if b.rank(B) > 2 else product
    return b.reshape_like(total, v)


def _factor_on_right(b: VjpBuilder, node: Node, g: str) -> str:
    return b.op("Mul", g, node.inputs[0])


def _factor_on_left(b: VjpBuilder, node: Node, g: str) -> str:
    return b.op("Mul", g, node.inputs[1])


# Map from whether each operand is a vector to functions for the cotangents of both operands.
_PRODUCTS = {
    (False, False): (_left_matrix, _right_matrix),
    (False, True): (_left_of_vector, _vector_on_right),
    (True, False): (_vector_on_left, _right_of_vector),
    (True, True): (_factor_on_left, _factor_on_right),
}


def _rows(b: VjpBuilder, value: str, rank: int) -> str:
    """Write all matrices of a batch stacked vertically, ``(rows, columns)``."""
    return value if rank == 2 else b.op("Flatten", value, axis=-1)


def _columns(b: VjpBuilder, value: str, rank: int) -> str:
    """Write all matrices of a batch stacked horizontally, ``(rows, matrices · columns)``."""
    order = (rank - 2, *range(rank - 2), rank - 1)
    return b.op("Flatten", b.op("Transpose", value, perm=order), axis=1)


def _swap_last(b: VjpBuilder, value: str, rank: int) -> str:
    return b.op("Transpose", value, perm=(*range(rank - 2), rank - 1, rank - 2))
