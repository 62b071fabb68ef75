"""Normalizations of ONNX Runtime's own, with their residual sums and tables of embeddings."""

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer, number
from kfac_engine.graph.structure import Node


@lowering("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(pen: Pen, node: Node) -> None:
    """LayerNormalization over the last axis of a sum, which may be a result too."""
    x, skip, scale, shift, bias = (*node.inputs, "", "")[:5]
    *results, total = (*node.outputs, "", "", "")[:4]
    summed = _sum(pen, (x, skip, bias), total)
    epsilon = number(node, "epsilon", 1e-12)
    _layer_normalization(pen, (summed, scale, shift), epsilon, results)


@lowering("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(pen: Pen, node: Node) -> None:
    """LayerNormalization of the sum of embeddings: of words, positions and perhaps segments."""
    words, segments, table, places, parts, scale, shift, mask, ids = (*node.inputs, "", "")[:9]
    y, counts, total = (*node.outputs, "", "")[:3]
    if counts and not mask:
        raise pen.refuse(node, "its result 'mask_index' is asked for without a mask")
    if not ids:
        length = pen.op("Squeeze", pen.op("Shape", words, start=1, end=2))
        ids = pen.op("Range", pen.constant(0), length, pen.constant(1))
    read = [pen.op("Gather", table, words), pen.op("Gather", places, ids)]
    read += [pen.op("Gather", parts, segments)] if segments else []
    summed = _sum(pen, tuple(read), total)
    _layer_normalization(pen, (summed, scale, shift), number(node, "epsilon", 1e-12), [y])
    if counts:
        pen.op("ReduceSum", mask, pen.constant([1]), to=counts, keepdims=0)


@lowering("SimplifiedLayerNormalization")
def simplified_layer_normalization(pen: Pen, node: Node) -> None:
    """``x / √(mean x² + ε) · scale``, the mean over the axes from ``axis`` on."""
    x, scale = node.inputs
    rank = len(pen.facts[x].shape)
    axes = tuple(range(integer(node, "axis", -1) % rank, rank))
    _root_mean_square(pen, node, (x, scale), axes, (*node.outputs, "")[:2])


@lowering("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(pen: Pen, node: Node) -> None:
    """``SimplifiedLayerNormalization`` over the last axis of a sum, which may be a result too."""
    x, skip, scale, bias = (*node.inputs, "")[:4]
    y, mean, inverse, total = (*node.outputs, "", "", "")[:4]
    if mean:
        raise pen.refuse(node, "its result 'mean' is asked for, which it does not compute")
    summed = _sum(pen, (x, skip, bias), total)
    _root_mean_square(pen, node, (summed, scale), (-1,), (y, inverse))


def _sum(pen: Pen, parts: tuple[str, ...], to: str) -> str:
    """The sum of the parts that there are, called ``to`` if that is given."""
    first, *others = (part for part in parts if part)
    *middle, last = others
    for part in middle:
        first = pen.op("Add", first, part)
    return pen.op("Add", first, last, to=to)


def _layer_normalization(
    pen: Pen, operands: tuple[str, ...], epsilon: float, results: list[str]
) -> None:
    """The standard operator over the last axis, with those results that are asked for."""
    given = [name for name in operands if name]
    while not results[-1]:
        results.pop()
    pen.multi("LayerNormalization", given, results, axis=-1, epsilon=epsilon)


def _root_mean_square(
    pen: Pen, node: Node, operands: tuple[str, str], axes: tuple[int, ...], results: tuple[str, ...]
) -> None:
    x, scale = operands
    like = node.inputs[0]
    square = pen.op("ReduceMean", pen.op("Mul", x, x), pen.constant(axes), keepdims=1)
    shifted = pen.op("Add", square, pen.scalar(number(node, "epsilon", 1e-5), like))
    inverse = pen.op("Reciprocal", pen.op("Sqrt", shifted), to=results[1])
    pen.op("Mul", pen.op("Mul", x, inverse), scale, to=results[0])
