"""Derivatives of operators that select entries by condition, length or value, and of Range."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.rules.indexing import rearranged
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


@vjp_rule("Compress")
def compress(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangents at the selected entries, and zero elsewhere."""
    return {0: rearranged(b, node, g[0])}


@vjp_rule("ReverseSequence")
def reverse_sequence(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the reversed cotangent."""
    batch, time = integer(node, "batch_axis", 1), integer(node, "time_axis", 0)
    lengths = node.inputs[1]
    return {0: b.op("ReverseSequence", g[0], lengths, batch_axis=batch, time_axis=time)}


@vjp_rule("Unique")
def unique(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent of each value at its first occurrence."""
    x = node.inputs[0]
    first = b.repeat(node, x, outputs=2)[1]
    if "axis" not in node.attributes:
        flat = (b.op("Reshape", b.zeros(x), b.constant([-1])), first, g[0])
        return {0: b.reshape_like(b.op("ScatterElements", *flat, axis=0, reduction="add"), x)}
    axis = integer(node, "axis", 0) % b.rank(x)
    others = b.constant([other for other in range(b.rank(x)) if other != axis], "int64")
    places = b.op("Expand", b.op("Unsqueeze", first, others), b.op("Shape", g[0]))
    return {0: b.op("ScatterElements", b.zeros(x), places, g[0], axis=axis, reduction="add")}


@vjp_rule("OneHot")
def one_hot(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the sums of the cotangents over entries with the off value and with the on value."""
    indices, depth, values = node.inputs
    axis = integer(node, "axis", -1)
    bits = b.constant([0, 1], b.dtype(values).name)
    shown = b.op("Mul", g[0], b.forward("OneHot", indices, depth, bits, axis=axis)[0])
    on, total = (b.op("ReduceSum", part, keepdims=0) for part in (shown, g[0]))
    one = b.constant([1])
    both = [b.op("Reshape", part, one) for part in (b.op("Sub", total, on), on)]
    return {2: b.op("Concat", *both, axis=0)}


@vjp_rule("Range")
def range_(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradients of start and delta in y = start + i · delta."""
    y, start = node.outputs[0], node.inputs[0]
    gradients = {}
    if 0 in wanted:
        gradients[0] = b.op("ReduceSum", g[0], keepdims=0)
    if 2 in wanted:
        # The numbers i are counted, because a division by a small delta would be inaccurate.
        count = b.forward("Squeeze", b.shape(y))[0]
        numbers = b.forward("Range", b.constant(0), count, b.constant(1))[0]
        steps = b.op("Mul", g[0], b.cast_like(numbers, start))
        gradients[2] = b.op("ReduceSum", steps, keepdims=0)
    return gradients
