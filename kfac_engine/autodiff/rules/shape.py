"""Differentiates operators that move, copy, slice or reshape entries without changing them."""

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, integers, text
from kfac_engine.autodiff.rules.indexing import rearranged
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.graph.structure import Node

# -- the same elements -----------------------------------------------------------------------------


@vjp_rule("Identity")
def identity(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent."""
    return {0: g[0]}


@vjp_rule("Cast", "CastLike")
def cast(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent in the type of the first operand."""
    return {0: b.cast_like(g[0], node.inputs[0])} if 0 in wanted else {}


@vjp_rule("Dropout")
def dropout(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent times the mask of the forward pass and the scale."""
    x, ratio, training = (*node.inputs, "", "")[:3]
    frozen = b.graph.constants.get(training) if training else None
    if not training or (frozen is not None and not frozen.any()):
        return {0: g[0]}
    mask = node.outputs[1] if len(node.outputs) > 1 else ""
    if not mask:
        raise UnsupportedOpError(
            f"Dropout in training mode at node '{node.name}' does not return its mask; add the "
            f"second output of the node, or export the model for inference."
        )
    one = b.scalar(1, x)
    share = b.op("Sub", one, b.cast_like(ratio, x) if ratio else b.scalar(0.5, x))
    scale = b.op("Where", training, share, one)
    return {0: b.op("Div", b.op("Mul", g[0], b.cast_like(mask, x)), scale)}


@vjp_rule("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def reshape(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent in the shape of the operand."""
    return {0: b.reshape_like(g[0], node.inputs[0])}


@vjp_rule("Transpose")
def transpose(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent under the inverse permutation of axes."""
    axes = range(b.rank(node.inputs[0]))
    perm = integers(node, "perm", axes[::-1])
    return {0: b.op("Transpose", g[0], perm=tuple(perm.index(axis) for axis in axes))}


# -- joined and split ------------------------------------------------------------------------------


@vjp_rule("Concat")
def concat(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the parts of the cotangent along the axis."""
    axis = integer(node, "axis", 0)
    at = b.constant([axis])
    sizes = [b.forward("Gather", b.shape(name), at) for name in node.inputs]
    cuts = b.forward("Concat", *sizes, axis=0)
    pieces = b.multi("Split", [g[0], cuts], ("",) * len(sizes), axis=axis)
    return {i: pieces[i] for i in wanted}


@vjp_rule("Split")
def split(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the concatenated cotangents, with zeros for results without a cotangent."""
    pieces = [g[i] if i in g else b.zeros(name) for i, name in enumerate(node.outputs)]
    return {0: b.op("Concat", *pieces, axis=integer(node, "axis", 0))}


# -- copied ----------------------------------------------------------------------------------------


@vjp_rule("Expand")
def expand(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Sum over the copies."""
    return {0: b.unbroadcast(g[0], node.outputs[0], node.inputs[0])}


@vjp_rule("Tile")
def tile(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Sum over the copies."""
    x, repeats = node.inputs
    # Each axis of g has copies as outer and entries as inner index, so split it and sum over the
    # copies.
    one = b.constant([1])
    columns = [b.forward("Unsqueeze", name, one) for name in (repeats, b.shape(x))]
    pairs = b.forward("Concat", *columns, axis=1)
    apart = b.op("Reshape", g[0], b.forward("Reshape", pairs, b.constant([-1])))
    copies = b.constant(range(0, 2 * b.rank(x), 2))
    return {0: b.op("ReduceSum", apart, copies, keepdims=0)}


# -- cut and padded --------------------------------------------------------------------------------


@vjp_rule("Slice")
def slice_(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent, padded with zeros."""
    x, starts, _, axes, steps = (*node.inputs, "", "")[:5]
    frozen = b.graph.constants.get(steps) if steps else None
    if steps and (frozen is None or (frozen != 1).any()):
        return {0: rearranged(b, node, g[0])}
    at = axes or b.constant(range(b.sample_shape(starts)[0]))
    zero = b.constant([0])
    sizes = b.forward("Gather", b.shape(x), at)
    begin = b.forward("Cast", starts, to=_INT64)
    from_end = b.forward("Less", begin, zero)
    begin = b.forward("Where", from_end, b.forward("Add", begin, sizes), begin)
    begin = b.forward("Min", b.forward("Max", begin, zero), sizes)
    length = b.forward("Gather", b.shape(node.outputs[0]), at)
    end = b.forward("Sub", b.forward("Sub", sizes, begin), length)
    pads = b.forward("Concat", begin, end, axis=0)
    return {0: b.pad(g[0], pads, at, b.rank(x))}


@vjp_rule("Pad")
def pad(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent without padding, and the sum over the padding for the constant."""
    x, pads, _, axes = (*node.inputs, "", "")[:4]
    if text(node, "mode", "constant") != "constant":
        return {0: rearranged(b, node, g[0])}
    y, zero = node.outputs[0], b.constant([0])
    at = _wide(b, axes) if axes else b.constant(range(b.rank(x)))
    # Negative padding removes pixels, whose cotangents are zero.
    added = b.forward("Max", pads, zero)
    begin, end = b.halves(added)
    sizes = b.forward("Gather", b.shape(y), at)
    pixels = b.op("Slice", g[0], begin, b.forward("Sub", sizes, end), at)
    gradients = {}
    if 0 in wanted:
        frozen = b.graph.constants.get(pads)
        if frozen is not None and (frozen >= 0).all():
            gradients[0] = pixels
        else:
            cut = b.forward("Max", b.forward("Neg", pads), zero)
            gradients[0] = b.pad(pixels, cut, at, b.rank(x))
    if 2 in wanted:
        border = b.op("Sub", *(b.op("ReduceSum", v, keepdims=0) for v in (g[0], pixels)))
        gradients[2] = b.reshape_like(border, node.inputs[2])
    return gradients


def _wide(b: VjpBuilder, axes: str) -> str:
    """Write axes as int64, as a constant if they are constant."""
    frozen = b.graph.constants.get(axes)
    return b.forward("Cast", axes, to=_INT64) if frozen is None else b.constant(frozen, "int64")


_INT64 = 7  # TensorProto.INT64


# -- blocks of pixels ------------------------------------------------------------------------------


@vjp_rule("DepthToSpace")
def depth_to_space(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the SpaceToDepth of the cotangent."""
    block = integer(node, "blocksize", 1)
    deep = b.op("SpaceToDepth", g[0], blocksize=block)
    if text(node, "mode", "DCR") == "DCR":
        return {0: deep}
    # CRD numbers channels as (channel, block), and SpaceToDepth as (block, channel).
    pixels = b.op("Shape", deep, start=2)
    apart = b.op("Concat", b.constant([0, block * block, -1]), pixels, axis=0)
    swapped = b.op("Transpose", b.op("Reshape", deep, apart), perm=(0, 2, 1, 3, 4))
    return {0: b.reshape_like(swapped, node.inputs[0])}


@vjp_rule("SpaceToDepth")
def space_to_depth(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the DepthToSpace of the cotangent."""
    return {0: b.op("DepthToSpace", g[0], blocksize=integer(node, "blocksize", 1), mode="DCR")}
