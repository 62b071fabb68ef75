"""Differentiates matrix products, Einstein sums, determinants, triangles and inverses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, number, text
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import Node

# TensorProto.UINT8
_UINT8 = 2
# How much larger a batch may be than the batch of the sample run, which has two examples.
_BATCH = 16


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
        if not ta and alpha == 1:
            _record_rows(b, gradients[1], (left, right), node)
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
    if summed := _broadcast_batch(b, node, A):
        sides = (g, node.outputs[0]), (B, B)
        return b.reshape_like(_sum_of_products(b, sides, summed, rows=-2), A)
    return b.op("MatMul", g, _swap_last(b, B, b.rank(B)))


def _right_matrix(b: VjpBuilder, node: Node, g: str) -> str:
    """Write Aᵀ G, summed over the batch axes that B does not have."""
    A, B = node.inputs
    rank = b.rank(A)
    if b.rank(B) == 2:
        left, right = _rows(b, A, rank), _rows(b, g, rank)
        product = b.op("Gemm", left, right, transA=1)
        _record_rows(b, product, (left, right), node)
        return product
    if summed := _broadcast_batch(b, node, B):
        sides = (A, A), (g, node.outputs[0])
        return b.reshape_like(_sum_of_products(b, sides, summed, rows=-1), B)
    return b.op("MatMul", _swap_last(b, A, rank), g)


def _broadcast_batch(b: VjpBuilder, node: Node, operand: str) -> list[int]:
    """Return the batch axes along which an operand was broadcast, counted from the last axis."""
    return [axis for axis in b.broadcast_axes(node.outputs[0], operand) if axis < -2]


def _sum_of_products(
    b: VjpBuilder, sides: Sequence[tuple[str, str]], summed: Sequence[int], *, rows: int
) -> str:
    """Write the products ``left · rightᵀ`` of two batches of matrices, summed over batch axes.

    Each side is a value and a forward value with its axes. The matrices along the axes ``summed``
    of the second, counted from the last, become one wide matrix, so that no product is formed for
    each of them. ``rows`` is the axis that both matrices of a product have as rows.
    """
    wide = []
    for value, like in sides:
        rank = b.rank(like)
        batch = [axis for axis in range(-rank, -2) if axis not in summed]
        order = (*batch, rows, *summed, -3 - rows)
        moved = b.op("Transpose", value, perm=tuple(axis + rank for axis in order))
        wide.append(b.op("Reshape", moved, b.constant([*[0] * (len(batch) + 1), -1])))
    left, right = wide
    return b.op("MatMul", left, _swap_last(b, right, len(batch) + 2))


def _record_rows(b: VjpBuilder, product: str, sides: tuple[str, str], node: Node) -> None:
    """List a product ``leftᵀ · right`` in ``row_products`` if few rows make a large result."""
    *counts, ins = b.sample_shape(node.inputs[0])
    outs = b.sample_shape(node.outputs[0])[-1]
    if _BATCH * prod(counts) * (ins + outs) <= ins * outs:
        b.row_products[product] = sides


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


# -- Einstein sums ---------------------------------------------------------------------------------
#
# With y = Σ a·b over the letters that y does not have, the gradient of a is Σ g·b over the letters
# that a does not have. Three cases need further nodes: a letter that only the operand has, along
# which its gradient is constant; an axis of size one that is broadcast; and a letter twice in one
# operand, for which only the diagonal has a gradient.


_DOTS = "..."


@dataclass(frozen=True, slots=True)
class _Factor:
    """A value and one letter for each of its axes."""

    value: str
    letters: str


@vjp_rule("Einsum")
def einsum(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Write an Einstein sum for each operand."""
    *terms, result = _terms(b, node)
    operands = [
        _narrowed(b, name, name, term) for name, term in zip(node.inputs, terms, strict=True)
    ]
    cotangent = _narrowed(b, g[0], node.outputs[0], result)
    return {
        i: _gradient(b, node.inputs[i], terms[i], [cotangent, *operands[:i], *operands[i + 1 :]])
        for i in wanted
    }


def _gradient(b: VjpBuilder, x: str, term: str, others: Sequence[_Factor]) -> str:
    """Write the gradient of the operand ``x``, whose letters in the equation are ``term``."""
    shape = b.sample_shape(x)
    known = {letter for factor in others for letter in factor.letters}
    known -= {letter for letter, size in zip(term, shape, strict=True) if size == 1}
    letters = [letter for letter in dict.fromkeys(term) if letter in known]
    factors = _in_order(others, letters)
    equation = f"{','.join(factor.letters for factor in factors)}->{''.join(letters)}"
    value = b.op("Einsum", *(factor.value for factor in factors), equation=equation)
    places = {term.index(letter) for letter in letters}
    if added := [axis for axis in range(len(term)) if axis not in places]:
        value = b.op("Unsqueeze", value, b.constant(added))
    diagonals = [(term.index(term[axis]), axis) for axis in added if shape[axis] != 1]
    twice = [(first, second) for first, second in diagonals if first != second]
    for first, second in twice:
        value = b.op("Mul", value, _diagonal(b, x, first, second))
    constant = {first for first, second in diagonals if first == second}
    if constant - {first for first, _ in twice}:
        value = b.op("Expand", value, b.shape(x))
    return value


def _in_order(factors: Sequence[_Factor], result: Sequence[str]) -> Sequence[_Factor]:
    """Return the factors, sorted so that ONNX Runtime need not transpose the product."""
    # Factors with the first result letter that not all factors have come first. The gradients of
    # the two Einstein sums of attention take 0.7 to 1.0 ms in this order, and 2.5 ms in the other
    # order.
    for letter in result:
        without = [letter not in factor.letters for factor in factors]
        if any(without):
            return [factors[i] for i in sorted(range(len(factors)), key=lambda i: without[i])]
    return factors


def _diagonal(b: VjpBuilder, x: str, first: int, second: int) -> str:
    """Write ones where two axes of ``x`` have equal indices, and zeros elsewhere."""
    size = b.forward("Gather", b.shape(x), b.constant(first))
    line = b.indices(size)
    rank = b.rank(x)
    along = [
        b.forward("Unsqueeze", line, b.constant([other for other in range(rank) if other != axis]))
        for axis in (first, second)
    ]
    return b.cast_like(b.forward("Equal", *along), x)


def _narrowed(b: VjpBuilder, value: str, like: str, letters: str) -> _Factor:
    """Write ``value`` without the axes in which the forward value ``like`` has size one."""
    ones = [axis for axis, size in enumerate(b.sample_shape(like)) if size == 1]
    if not ones:
        return _Factor(value, letters)
    letters = "".join(letter for axis, letter in enumerate(letters) if axis not in ones)
    return _Factor(b.op("Squeeze", value, b.constant(ones)), letters)


def _terms(b: VjpBuilder, node: Node) -> tuple[str, ...]:
    """Return the letters of each operand and of the result, with letters for dots."""
    equation = text(node, "equation", "").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        counts = Counter(left.replace(_DOTS, "").replace(",", ""))
        once = sorted(letter for letter, count in counts.items() if count == 1)
        result = (_DOTS if _DOTS in left else "") + "".join(once)
    free = [letter for letter in ascii_letters if letter not in equation]
    ranks = [b.rank(name) for name in (*node.inputs, node.outputs[0])]
    return tuple(
        _without_dots(term, rank, free) for term, rank in zip((*terms, result), ranks, strict=True)
    )


def _without_dots(term: str, rank: int, free: Sequence[str]) -> str:
    """Return a term with letters for dots; shorter operands align with the trailing axes."""
    dotted = rank - len(term.replace(_DOTS, ""))
    # Letters are assigned from the last axis, because operands share the last axes.
    return term.replace(_DOTS, "".join(reversed(free[:dotted])))


# -- triangles, determinants and inverses ----------------------------------------------------------


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
    transposed = _swap_last(b, x, b.rank(x))
    return {0: b.op("Mul", scaled, b.op("Inverse", transposed, domain="com.microsoft"))}


def _cofactors(b: VjpBuilder, x: str) -> str:
    rank, one = b.rank(x), b.constant(1)
    n = b.forward("Gather", b.shape(x), b.constant(rank - 1))
    column = b.forward("Unsqueeze", b.indices(n), b.constant([1]))
    shorter = b.indices(b.forward("Sub", n, one))
    # Row i contains all numbers below n except i.
    behind = b.forward("GreaterOrEqual", shorter, column)
    rest = b.forward("Add", shorter, b.forward("Cast", behind, to=_INT64))
    rows = b.op("Gather", x, rest, axis=rank - 2)
    minors = b.op("Gather", rows, rest, axis=rank)
    batch = range(rank - 2)
    minors = b.op("Transpose", minors, perm=(*batch, rank - 2, rank, rank - 1, rank + 1))
    # The signs alternate along both axes.
    place = b.forward("Mod", b.forward("Add", column, b.indices(n)), b.constant(2))
    sign = b.forward("Sub", one, b.forward("Add", place, place))
    return b.op("Mul", b.op("Det", minors), b.cast_like(sign, x))


@vjp_rule("com.microsoft::Inverse")
def inverse(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return −Yᵀ G Yᵀ for each matrix of a batch."""
    y = node.outputs[0]
    transposed = _swap_last(b, y, b.rank(y))
    return {0: b.op("Neg", b.op("MatMul", b.op("MatMul", transposed, g[0]), transposed))}


# -- products with weights of four or eight bits ---------------------------------------------------


@vjp_rule("com.microsoft::MatMulNBits")
def matmul_n_bits(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradients of A, scales, real zero points and bias in ``Y = A W + bias``.

    ``Wᵀ = (q − zero) · scale`` for each block of ``block_size`` inputs. The forward pass keeps the
    packed numbers; the backward pass makes the real weights of one product at a time.
    """
    a, _, scales, zeros, order, bias = (*node.inputs, "", "", "")[:6]
    bits = integer(node, "bits", 4)
    if order or bits not in {4, 8}:
        why = "its operand g_idx is not supported" if order else f"{bits} bits are not covered"
        raise UnsupportedOpError(
            f"no derivative of {node.qualified_op} at node '{node.name}': {why}."
        )
    gradients = {}
    if 0 in wanted:
        gradients[0] = b.op("MatMul", g[0], _unpacked_weight(b, node, g[0]))
    if 5 in wanted:
        gradients[5] = b.unbroadcast(g[0], node.outputs[0], bias)
    if wanted & {2, 3}:
        rows = (_rows(b, g[0], b.rank(node.outputs[0])), _rows(b, a, b.rank(a)))
        blocks = _blocks(b, node, b.op("Gemm", *rows, transA=1))
        q, zero = _centred(b, node, g[0])
        if 2 in wanted:
            products = b.op("Mul", blocks, b.op("Sub", q, zero))
            gradients[2] = b.reshape_like(_sum_of_rows(b, products), scales)
        if 3 in wanted:
            scaled = b.op("Mul", _sum_of_rows(b, blocks), _column(b, scales))
            gradients[3] = b.reshape_like(b.op("Neg", scaled), zeros)
    return gradients


def _unpacked_weight(b: VjpBuilder, node: Node, g: str) -> str:
    """Write ``Wᵀ``, ``(outputs, inputs)``."""
    scales, zeros = (*node.inputs, "")[2:4]
    bits, outputs = integer(node, "bits", 4), integer(node, "N", 1)
    if zeros and b.dtype(zeros) != np.uint8:
        q, zero = _centred(b, node, g)
        blocks = b.op("Mul", b.op("Sub", q, zero), _column(b, scales))
    else:
        # One pass over the weights; a block is a row, and each row has a scale.
        zero = (
            b.reshape(_unpacked_zeros(b, node), [-1])
            if zeros
            else b.constant(np.full(prod(b.sample_shape(scales)), 2 ** (bits - 1), np.uint8))
        )
        blocks = b.op(
            "DequantizeLinear", _numbers(b, node, g), b.reshape(scales, [-1]), zero, axis=0
        )
    flat = b.reshape(blocks, [outputs, -1])
    inputs, block = integer(node, "K", 1), integer(node, "block_size", 32)
    if inputs % block == 0:
        return flat
    return b.op("Slice", flat, b.constant([0]), b.constant([inputs]), b.constant([1]))


def _numbers(b: VjpBuilder, node: Node, g: str) -> str:
    """Write the numbers of the weight, a block in each row."""
    packed, bits = node.inputs[1], integer(node, "bits", 4)
    # This zero depends on the batch. ONNX Runtime would otherwise compute the weights once and
    # store them in single precision, in eight times the memory.
    first = b.op("Slice", b.reshape(g, [-1]), b.constant([0]), b.constant([1]))
    never = b.op("Greater", first, b.constant(np.asarray(np.inf, b.dtype(node.outputs[0]))))
    zero = b.op("Cast", never, to=_UINT8)
    numbers = b.op("BitwiseOr", packed, zero) if bits == 8 else _nibbles(b, packed, zero)
    return b.reshape(numbers, [-1, integer(node, "block_size", 32)])


def _nibbles(b: VjpBuilder, packed: str, zero: str) -> str:
    """Write the halves of bytes, the lower half first, on a new last axis."""
    mask, shift = (b.op("BitwiseOr", b.constant(n, "uint8"), zero) for n in (15, 4))
    lower = b.op("BitwiseAnd", packed, mask)
    upper = b.op("BitShift", packed, shift, direction="RIGHT")
    last = b.constant([-1])
    pair = [b.op("Unsqueeze", half, last) for half in (lower, upper)]
    return b.op("Concat", *pair, axis=-1)


def _unpacked_zeros(b: VjpBuilder, node: Node) -> str:
    """Write the zero points of an output in a row; bytes of four bits hold two of them."""
    outputs = integer(node, "N", 1)
    packed = b.reshape(node.inputs[3], [outputs, -1])
    if integer(node, "bits", 4) == 8:
        return packed
    whole = b.reshape(_nibbles(b, packed, b.constant(0, "uint8")), [outputs, -1])
    blocks = -(-integer(node, "K", 1) // integer(node, "block_size", 32))
    # With an odd number of blocks, half of the last byte is unused.
    return b.op("Slice", whole, b.constant([0]), b.constant([blocks]), b.constant([1]))


def _centred(b: VjpBuilder, node: Node, g: str) -> tuple[str, str]:
    """Write the numbers and the zero points of blocks as real numbers, a block in each row."""
    scales, zeros = (*node.inputs, "")[2:4]
    q = b.cast_like(_numbers(b, node, g), scales)
    if not zeros:
        return q, b.scalar(2.0 ** (integer(node, "bits", 4) - 1), scales)
    if b.dtype(zeros) != np.uint8:
        return q, _column(b, zeros)
    return q, b.cast_like(_column(b, _unpacked_zeros(b, node)), scales)


def _blocks(b: VjpBuilder, node: Node, flat: str) -> str:
    """Write a matrix ``(outputs, inputs)`` with a block in each row; the last one has zeros."""
    block = integer(node, "block_size", 32)
    missing = -integer(node, "K", 1) % block
    if missing:
        flat = b.op("Pad", flat, b.constant([0, 0, 0, missing]))
    return b.reshape(flat, [-1, block])


def _column(b: VjpBuilder, values: str) -> str:
    return b.reshape(values, [-1, 1])


def _sum_of_rows(b: VjpBuilder, values: str) -> str:
    return b.op("ReduceSum", values, b.constant([1]), keepdims=1)
