"""Writes products of data with frozen weights of four or eight bits."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node


@lowering("com.microsoft::MatMulNBits")
def matmul_n_bits(b: LoweringBuilder, node: Node) -> None:
    """Write ``A W + bias`` with ``Wᵀ = (q − zero) · scale`` for each block.

    ``A`` is not rounded, for every accuracy level of the node.
    """
    a, packed, scales, zeros, order, bias = (*node.inputs, "", "", "")[:6]
    bits, rows = integer(node, "bits", 4), integer(node, "N", 1)
    if order:
        raise b.refuse(node, "its operand 'g_idx' is not supported")
    if bits not in {4, 8}:
        raise b.refuse(node, "only numbers of four or eight bits are covered")
    each = b.constant([rows, -1, 1])
    whole = _unpacked(b, packed, bits, b.constant([rows, 0, -1]))
    centred = b.op("Sub", _floats(b, whole, a), _zero(b, node, zeros, each))
    scaled = b.op("Mul", centred, b.op("Reshape", scales, each))
    flat = b.op("Reshape", scaled, b.constant([rows, -1]))
    used = b.constant([integer(node, "K", 1)])
    flat = b.op("Slice", flat, b.constant([0]), used, b.constant([1]))
    matrix = b.op("Transpose", flat, perm=(1, 0))
    if bias:
        b.op("Add", b.op("MatMul", a, matrix), bias, result=node.outputs[0])
    else:
        b.op("MatMul", a, matrix, result=node.outputs[0])


def _zero(b: LoweringBuilder, node: Node, zeros: str, each: str) -> str:
    """Write the zero point of each block."""
    a, bits = node.inputs[0], integer(node, "bits", 4)
    if not zeros:
        return b.scalar(2.0 ** (bits - 1), a)
    if b.facts[zeros].dtype != np.uint8:
        return b.op("Reshape", zeros, each)
    rows = b.op("Reshape", zeros, b.constant([integer(node, "N", 1), -1]))
    whole = _unpacked(b, rows, bits, b.constant([0, -1]))
    blocks = -(-integer(node, "K", 1) // integer(node, "block_size", 32))
    # With an odd number of blocks, half of the last byte is unused.
    used_blocks = b.op("Slice", whole, b.constant([0]), b.constant([blocks]), b.constant([1]))
    return b.op("Reshape", _floats(b, used_blocks, a), each)


def _unpacked(b: LoweringBuilder, packed: str, bits: int, shape: str) -> str:
    """Write the integers in packed bytes, the lower half of a byte first, in a new shape."""
    if bits == 8:
        return b.op("Reshape", packed, shape)
    lower = b.op("BitwiseAnd", packed, b.constant(15, "uint8"))
    upper = b.op("BitShift", packed, b.constant(4, "uint8"), direction="RIGHT")
    last = b.constant([-1])
    pair = [b.op("Unsqueeze", half, last) for half in (lower, upper)]
    return b.op("Reshape", b.op("Concat", *pair, axis=-1), shape)


def _floats(b: LoweringBuilder, whole: str, like: str) -> str:
    return b.cast(whole, b.facts[like].dtype.name)
