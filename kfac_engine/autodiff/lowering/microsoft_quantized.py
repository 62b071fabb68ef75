"""Products with weights of four or eight bits: frozen, but what goes through them is not."""

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node


@lowering("com.microsoft::MatMulNBits")
def matmul_n_bits(pen: Pen, node: Node) -> None:
    """``A W + bias`` with ``Wᵀ = (q − zero) · scale``, zero and scale being those of a block.

    ``A`` enters as it is, whatever accuracy the kernel may use.
    """
    a, packed, scales, zeros, order, bias = (*node.inputs, "", "", "")[:6]
    bits, rows = integer(node, "bits", 4), integer(node, "N", 1)
    if bits not in {4, 8} or order:
        raise pen.refuse(
            node, "only blocks in order, of numbers of four or eight bits, are covered"
        )
    each = pen.constant([rows, -1, 1])
    whole = _unpacked(pen, packed, bits, pen.constant([rows, 0, -1]))
    centred = pen.op("Sub", _floats(pen, whole, a), _zero(pen, node, zeros, each))
    scaled = pen.op("Mul", centred, pen.op("Reshape", scales, each))
    flat = pen.op("Reshape", scaled, pen.constant([rows, -1]))
    used = pen.constant([integer(node, "K", 1)])
    kept = pen.op("Slice", flat, pen.constant([0]), used, pen.constant([1]))
    turned = pen.op("Transpose", kept, perm=(1, 0))
    if bias:
        pen.op("Add", pen.op("MatMul", a, turned), bias, to=node.outputs[0])
    else:
        pen.op("MatMul", a, turned, to=node.outputs[0])


def _zero(pen: Pen, node: Node, zeros: str, each: str) -> str:
    """The number that stands for zero, in each block."""
    a, bits = node.inputs[0], integer(node, "bits", 4)
    if not zeros:
        return pen.scalar(2.0 ** (bits - 1), a)
    if pen.facts[zeros].dtype != np.uint8:
        return pen.op("Reshape", zeros, each)
    rows = pen.op("Reshape", zeros, pen.constant([integer(node, "N", 1), -1]))
    whole = _unpacked(pen, rows, bits, pen.constant([0, -1]))
    blocks = -(-integer(node, "K", 1) // integer(node, "block_size", 32))
    # An odd number of blocks leaves half a byte over.
    kept = pen.op("Slice", whole, pen.constant([0]), pen.constant([blocks]), pen.constant([1]))
    return pen.op("Reshape", _floats(pen, kept, a), each)


def _unpacked(pen: Pen, packed: str, bits: int, sides: str) -> str:
    """Whole numbers from bytes, the lower half of a byte first, in another shape."""
    if bits == 8:
        return pen.op("Reshape", packed, sides)
    lower = pen.op("BitwiseAnd", packed, pen.constant(15, "uint8"))
    upper = pen.op("BitShift", packed, pen.constant(4, "uint8"), direction="RIGHT")
    last = pen.constant([-1])
    pair = [pen.op("Unsqueeze", half, last) for half in (lower, upper)]
    return pen.op("Reshape", pen.op("Concat", *pair, axis=-1), sides)


def _floats(pen: Pen, whole: str, like: str) -> str:
    return pen.cast(whole, pen.facts[like].dtype.name)
