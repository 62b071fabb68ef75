"""Writes the normalizations of ``com.microsoft``, some with residual sums or embeddings."""

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, number
from kfac_engine.graph.structure import Node


@lowering("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(b: LoweringBuilder, node: Node) -> None:
    """Write LayerNormalization over the last axis of a sum, which may be a result, too."""
    x, skip, scale, shift, bias = (*node.inputs, "", "")[:5]
    *results, total = (*node.outputs, "", "", "")[:4]
    summed = _sum(b, (x, skip, bias), total)
    epsilon = number(node, "epsilon", 1e-12)
    _layer_normalization(b, (summed, scale, shift), epsilon, results)


@lowering("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(b: LoweringBuilder, node: Node) -> None:
    """Write LayerNormalization of the sum of word, position and optional segment embeddings."""
    words, segments, table, places, parts, scale, shift, mask, ids = (*node.inputs, "", "")[:9]
    y, counts, total = (*node.outputs, "", "")[:3]
    if counts and not mask:
        raise b.refuse(node, "its result 'mask_index' needs a mask")
    if not ids:
        length = b.op("Squeeze", b.op("Shape", words, start=1, end=2))
        ids = b.op("Range", b.constant(0), length, b.constant(1))
    read = [b.op("Gather", table, words), b.op("Gather", places, ids)]
    read += [b.op("Gather", parts, segments)] if segments else []
    summed = _sum(b, tuple(read), total)
    _layer_normalization(b, (summed, scale, shift), number(node, "epsilon", 1e-12), [y])
    if counts:
        b.op("ReduceSum", mask, b.constant([1]), result=counts, keepdims=0)


@lowering("SimplifiedLayerNormalization")
def simplified_layer_normalization(b: LoweringBuilder, node: Node) -> None:
    """Write ``x / √(mean x² + ε) · scale``, with the mean over the axes that start at ``axis``."""
    x, scale = node.inputs
    rank = len(b.facts[x].shape)
    axes = tuple(range(integer(node, "axis", -1) % rank, rank))
    _root_mean_square(b, node, (x, scale), axes, (*node.outputs, "")[:2])


@lowering("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(b: LoweringBuilder, node: Node) -> None:
    """Write ``SimplifiedLayerNormalization`` of a sum, which may be a result, too."""
    x, skip, scale, bias = (*node.inputs, "")[:4]
    y, mean, inverse, total = (*node.outputs, "", "", "")[:4]
    if mean:
        raise b.refuse(node, "it does not compute its result 'mean'")
    summed = _sum(b, (x, skip, bias), total)
    _root_mean_square(b, node, (summed, scale), (-1,), (y, inverse))


def _sum(b: LoweringBuilder, parts: tuple[str, ...], result: str) -> str:
    """Write the sum of the non-empty parts, named ``result`` if that is not empty."""
    first, *others = (part for part in parts if part)
    *middle, last = others
    for part in middle:
        first = b.op("Add", first, part)
    return b.op("Add", first, last, result=result)


def _layer_normalization(
    b: LoweringBuilder, operands: tuple[str, ...], epsilon: float, results: list[str]
) -> None:
    """Write LayerNormalization over the last axis, with the results ``results``."""
    present = [name for name in operands if name]
    while not results[-1]:
        results.pop()
    b.multi("LayerNormalization", present, results, axis=-1, epsilon=epsilon)


def _root_mean_square(
    b: LoweringBuilder,
    node: Node,
    operands: tuple[str, str],
    axes: tuple[int, ...],
    results: tuple[str, ...],
) -> None:
    x, scale = operands
    like = node.inputs[0]
    square = b.op("ReduceMean", b.op("Mul", x, x), b.constant(axes), keepdims=1)
    shifted = b.op("Add", square, b.scalar(number(node, "epsilon", 1e-5), like))
    inverse = b.op("Reciprocal", b.op("Sqrt", shifted), result=results[1])
    b.op("Mul", b.op("Mul", x, inverse), scale, result=results[0])
