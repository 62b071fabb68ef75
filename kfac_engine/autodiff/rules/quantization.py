"""Derivatives of dequantizations, which multiply stored integers by a real scale."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


@vjp_rule("DequantizeLinear")
def dequantize(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the gradient of the scale in y = (x − zero point) · scale: a sum over entries."""
    x, scale, *zero_point = node.inputs
    # With a scale of one, the operator returns the integers.
    one = b.forward("Expand", b.scalar(1, scale), b.shape(scale))[0]
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
    side = b.forward("Gather", b.shape(x), b.constant([axis]))[0]
    missing = b.forward("Mod", b.forward("Neg", side)[0], b.constant([block]))[0]
    pads = b.forward("Concat", b.constant([0]), missing, axis=0)[0]
    whole = b.pad(wide, pads, b.constant([axis]), b.rank(x))
    before, after = (
        b.forward("Gather", b.shape(x), b.constant(axes, "int64"))[0]
        for axes in (range(axis), range(axis + 1, b.rank(x)))
    )
    shape = b.forward("Concat", before, b.constant([-1, block]), after, axis=0)[0]
    return b.op("ReduceSum", b.op("Reshape", whole, shape), b.constant([axis + 1]), keepdims=0)
