"""Writes the rotary position embeddings of the domain ``com.microsoft``."""

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node

_TO_HEADS = (0, 2, 1, 3)


@lowering("com.microsoft::RotaryEmbedding")
def rotary_embedding(b: LoweringBuilder, node: Node) -> None:
    """Write a rotation of pairs of features by an angle proportional to the position."""
    x, ids, cos, sin = node.inputs
    if integer(node, "is_packed_batching", 0):
        raise b.refuse(node, "packed batches are not supported")
    shape, size = b.facts[x].shape, 2 * b.facts[cos].shape[-1]
    heads, flat = integer(node, "num_heads", 0) or shape[-1] // size, len(shape) == 3
    split = x
    if flat:
        apart = b.op("Reshape", x, b.constant([0, 0, heads, -1]))
        split = b.op("Transpose", apart, perm=_TO_HEADS)
    places = ids if len(b.facts[ids].shape) == 2 else consecutive(b, ids, split)
    waves = angles(b, cos, sin, places)
    interleaved = bool(integer(node, "interleaved", 0))
    whole = shape[-1] // heads if flat else shape[-1]
    result = rotated(b, split, waves, min(size, whole), interleaved)
    if flat:
        result = b.op("Transpose", result, perm=_TO_HEADS)
    flat_shape = b.constant([0, 0, -1] if flat else [0, 0, 0, -1])
    b.op("Reshape", result, flat_shape, result=node.outputs[0])


def consecutive(b: LoweringBuilder, first: str, x: str) -> str:
    """Write consecutive positions ``(1, length)`` of heads ``(n, heads, length, size)``.

    Args:
        b: Writes the nodes.
        first: Name of the first position, with one element; ``""`` for zero.
        x: The heads.

    Returns:
        The name of the positions.
    """
    length = b.op("Squeeze", b.op("Shape", x, start=2, end=3))
    every = b.op("Range", b.constant(0), length, b.constant(1))
    return b.op("Unsqueeze", b.op("Add", every, first) if first else every, b.constant([0]))


def angles(b: LoweringBuilder, cos: str, sin: str, places: str) -> tuple[str, str]:
    """Write cosine and sine at each position, ``(n or 1, 1, length, size / 2)``."""
    heads = b.constant([1])
    one, other = (b.op("Unsqueeze", b.op("Gather", t, places), heads) for t in (cos, sin))
    return one, other


def rotated(
    b: LoweringBuilder, x: str, waves: tuple[str, str], width: int, interleaved: bool
) -> str:
    """Write heads with their first ``width`` features rotated.

    Args:
        b: Writes the nodes.
        x: ``(n, heads, length, size)``.
        waves: Names of cosine and sine.
        width: Number of rotated features, even.
        interleaved: Whether a pair is two adjacent features, instead of one from each half.

    Returns:
        The name of the result.
    """
    last, zero, end = b.constant([-1]), b.constant([0]), b.constant([width])
    turning = b.op("Slice", x, zero, end, last)
    rest = b.op("Slice", x, end, b.constant([2**31 - 1]), last)
    cos, sin = waves
    if interleaved:
        two = b.constant([2])
        firsts = b.op("Slice", turning, zero, end, last, two)
        seconds = b.op("Slice", turning, b.constant([1]), end, last, two)
    else:
        firsts, seconds = b.multi("Split", [turning], ("", ""), axis=-1, num_outputs=2)
    real = b.op("Sub", b.op("Mul", firsts, cos), b.op("Mul", seconds, sin))
    imaginary = b.op("Add", b.op("Mul", firsts, sin), b.op("Mul", seconds, cos))
    if interleaved:
        pair = [b.op("Unsqueeze", part, last) for part in (real, imaginary)]
        shape = b.op("Shape", turning)
        together = b.op("Reshape", b.op("Concat", *pair, axis=-1), shape)
    else:
        together = b.op("Concat", real, imaginary, axis=-1)
    return b.op("Concat", together, rest, axis=-1)
