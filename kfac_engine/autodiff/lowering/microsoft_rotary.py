"""Rotary position embedding as ONNX Runtime's own operators do it."""

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Node

_TO_HEADS = (0, 2, 1, 3)


@lowering("com.microsoft::RotaryEmbedding")
def rotary_embedding(pen: Pen, node: Node) -> None:
    """Pairs of features, turned by an angle that grows with the position."""
    x, ids, cos, sin = node.inputs
    if integer(node, "is_packed_batching", 0):
        raise pen.refuse(node, "packed batches are not covered")
    shape, size = pen.facts[x].shape, 2 * pen.facts[cos].shape[-1]
    heads, flat = integer(node, "num_heads", 0) or shape[-1] // size, len(shape) == 3
    split = x
    if flat:
        apart = pen.op("Reshape", x, pen.constant([0, 0, heads, -1]))
        split = pen.op("Transpose", apart, perm=_TO_HEADS)
    waves = angles(pen, cos, sin, positions(pen, ids, split))
    interleaved = bool(integer(node, "interleaved", 0))
    whole = shape[-1] // heads if flat else shape[-1]
    turned = rotated(pen, split, waves, min(size, whole), interleaved)
    if flat:
        turned = pen.op("Transpose", turned, perm=_TO_HEADS)
    sides = pen.constant([0, 0, -1] if flat else [0, 0, 0, -1])
    pen.op("Reshape", turned, sides, to=node.outputs[0])


def positions(pen: Pen, ids: str, x: str) -> str:
    """Positions ``(n or 1, length)``: as given, or counted on from one or from 0.

    Args:
        pen: Writes the nodes.
        ids: Empty, of one element, or ``(n, length)``.
        x: Heads, ``(n, heads, length, size)``.

    Returns:
        The name of the positions.
    """
    if ids and len(pen.facts[ids].shape) == 2:
        return ids
    length = pen.op("Squeeze", pen.op("Shape", x, start=2, end=3))
    every = pen.op("Range", pen.constant(0), length, pen.constant(1))
    return pen.op("Unsqueeze", pen.op("Add", every, ids) if ids else every, pen.constant([0]))


def angles(pen: Pen, cos: str, sin: str, places: str) -> tuple[str, str]:
    """Cosine and sine at each position, ``(n or 1, 1, length, size / 2)``."""
    heads = pen.constant([1])
    one, other = (pen.op("Unsqueeze", pen.op("Gather", t, places), heads) for t in (cos, sin))
    return one, other


def rotated(pen: Pen, x: str, waves: tuple[str, str], width: int, interleaved: bool) -> str:
    """Heads with their first ``width`` features turned.

    Args:
        pen: Writes the nodes.
        x: ``(n, heads, length, size)``.
        waves: Cosine and sine.
        width: An even number.
        interleaved: Whether pairs are neighbours, not halves.

    Returns:
        The name of the result.
    """
    last, zero, end = pen.constant([-1]), pen.constant([0]), pen.constant([width])
    turning = pen.op("Slice", x, zero, end, last)
    rest = pen.op("Slice", x, end, pen.constant([2**31 - 1]), last)
    cos, sin = waves
    if interleaved:
        two = pen.constant([2])
        firsts = pen.op("Slice", turning, zero, end, last, two)
        seconds = pen.op("Slice", turning, pen.constant([1]), end, last, two)
    else:
        firsts, seconds = pen.multi("Split", [turning], ("", ""), axis=-1, num_outputs=2)
    real = pen.op("Sub", pen.op("Mul", firsts, cos), pen.op("Mul", seconds, sin))
    imaginary = pen.op("Add", pen.op("Mul", firsts, sin), pen.op("Mul", seconds, cos))
    if interleaved:
        pair = [pen.op("Unsqueeze", part, last) for part in (real, imaginary)]
        sides = pen.op("Shape", turning)
        together = pen.op("Reshape", pen.op("Concat", *pair, axis=-1), sides)
    else:
        together = pen.op("Concat", real, imaginary, axis=-1)
    return pen.op("Concat", together, rest, axis=-1)
