"""Writes fused operators of the domain ``com.microsoft`` as standard operators.

Attention is in ``microsoft_attention``.
"""

from math import pi, sqrt

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, number, numbers, text
from kfac_engine.graph.structure import AttributeValue, Node

# -- activations -----------------------------------------------------------------------------------


@lowering("com.microsoft::QuickGelu")
def quick_gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x · sigmoid(α x)``."""
    x = node.inputs[0]
    gate = b.op("Sigmoid", b.op("Mul", x, b.scalar(number(node, "alpha", 1.702), x)))
    b.op("Mul", x, gate, result=node.outputs[0])


@lowering("com.microsoft::Gelu", "com.microsoft::BiasGelu")
def gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x (1 + erf(x/√2)) / 2``; ``x`` is the sum of the operands."""
    x, like = _with_bias(b, node), node.inputs[0]
    _weigh(b, node, x, b.op("Erf", b.op("Mul", x, b.scalar(1 / sqrt(2), like))))


@lowering("com.microsoft::FastGelu")
def fast_gelu(b: LoweringBuilder, node: Node) -> None:
    """Write ``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``; ``x`` is the sum of the operands."""
    x, like = _with_bias(b, node), node.inputs[0]
    square = b.op("Mul", b.op("Mul", x, x), b.scalar(0.044715, like))
    inner = b.op("Mul", x, b.op("Add", square, b.scalar(1, like)))
    _weigh(b, node, x, b.op("Tanh", b.op("Mul", inner, b.scalar(sqrt(2 / pi), like))))


def _weigh(b: LoweringBuilder, node: Node, x: str, bell: str) -> None:
    """Write ``x (1 + bell) / 2``."""
    like = node.inputs[0]
    half = b.op("Mul", x, b.scalar(0.5, like))
    b.op("Mul", half, b.op("Add", bell, b.scalar(1, like)), result=node.outputs[0])


def _with_bias(b: LoweringBuilder, node: Node) -> str:
    x, bias = (*node.inputs, "")[:2]
    return b.op("Add", x, bias) if bias else x


# -- products --------------------------------------------------------------------------------------


@lowering("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def fused_matmul(b: LoweringBuilder, node: Node) -> None:
    """Write ``α A B``, with the transpositions of the attributes."""
    x, y = node.inputs
    left, right = _transposed(b, node, x, "A"), _transposed(b, node, y, "B")
    _scaled(b, b.op("MatMul", left, right), number(node, "alpha", 1.0), x, node.outputs[0])


def _transposed(b: LoweringBuilder, node: Node, name: str, which: str) -> str:
    axes = list(range(len(b.facts[name].shape)))
    if len(axes) < 2:
        return name
    if integer(node, f"transBatch{which}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if integer(node, f"trans{which}", 0):
        axes[-2:] = axes[-1], axes[-2]
    return name if axes == sorted(axes) else b.op("Transpose", name, perm=tuple(axes))


def _scaled(b: LoweringBuilder, value: str, factor: float, like: str, result: str) -> None:
    """Write ``value`` times ``factor``."""
    if factor == 1.0:
        b.op("Identity", value, result=result)
    else:
        b.op("Mul", value, b.scalar(factor, like), result=result)


# Activations that may be fused, with the names of their parameters.
_ACTIVATIONS = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
}


@lowering("com.microsoft::FusedGemm")
def fused_gemm(b: LoweringBuilder, node: Node) -> None:
    """Write a Gemm followed by an activation."""
    copied = ("alpha", "beta", "transA", "transB")
    product = b.write("Gemm", node.inputs, ("",), _subset(node, copied))[0]
    values = {
        name: number(node, f"activation_{name}", 0.0)
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in node.attributes
    }
    _activate(b, node, product, values)


@lowering("com.microsoft::FusedConv")
def fused_conv(b: LoweringBuilder, node: Node) -> None:
    """Write a Conv plus a residual, followed by an activation."""
    x, weight, bias, residual = (*node.inputs, "", "")[:4]
    copied = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    operands = (x, weight, bias) if bias else (x, weight)
    product = b.write("Conv", operands, ("",), _subset(node, copied))[0]
    if residual:
        product = b.op("Add", product, residual)
    params = numbers(node, "activation_params", ())
    if text(node, "activation", "") == "Clip":
        b.op("Clip", product, *(b.scalar(bound, x) for bound in params), result=node.outputs[0])
        return
    names = _ACTIVATIONS.get(text(node, "activation", ""), ())
    _activate(b, node, product, dict(zip(names, params, strict=False)))


def _subset(node: Node, names: tuple[str, ...]) -> dict[str, AttributeValue]:
    return {name: node.attributes[name] for name in names if name in node.attributes}


def _activate(b: LoweringBuilder, node: Node, value: str, values: dict[str, float]) -> None:
    activation = text(node, "activation", "")
    if not activation:
        b.op("Identity", value, result=node.outputs[0])
        return
    if activation not in _ACTIVATIONS:
        raise b.refuse(node, f"the activation '{activation}' is not known")
    known = {name: values[name] for name in _ACTIVATIONS[activation] if name in values}
    b.write(activation, (value,), node.outputs, known)


# -- other forms of standard operators ---------------------------------------------------------


@lowering("com.microsoft::GatherND", "com.microsoft::Trilu")
def renamed(b: LoweringBuilder, node: Node) -> None:
    """Write the standard operator of the same name."""
    b.write(node.op, node.inputs, node.outputs, node.attributes)


@lowering("com.microsoft::ExpandDims")
def expand_dims(b: LoweringBuilder, node: Node) -> None:
    """Write Unsqueeze with one axis."""
    x, axis = node.inputs
    axes = b.op("Reshape", b.cast(axis, "int64"), b.constant([1]))
    b.op("Unsqueeze", x, axes, result=node.outputs[0])


@lowering("com.microsoft::GridSample")
def grid_sample(b: LoweringBuilder, node: Node) -> None:
    """Write the standard GridSample, whose modes have other names."""
    modes = {"bilinear": "linear", "bicubic": "cubic"} if b.graph.opset >= 20 else {}
    mode = text(node, "mode", "bilinear")
    attributes = {**node.attributes, "mode": modes.get(mode, mode)}
    b.write("GridSample", node.inputs, node.outputs, attributes)


# -- normalizations, some with residual sums or embeddings -----------------------------------------


@lowering("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(b: LoweringBuilder, node: Node) -> None:
    """Write LayerNormalization over the last axis of a sum; the sum may be a result, too."""
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
    """Write ``SimplifiedLayerNormalization`` of a sum; the sum may be a result, too."""
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


# -- products with frozen weights of four or eight bits --------------------------------------------


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
