"""Writes fused operators of the domain ``com.microsoft`` as standard operators.

Heads of attention have the layout ``(n, heads, length, size)``.
"""

from dataclasses import dataclass
from math import pi, sqrt

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, integers, number, numbers, text
from kfac_engine.graph.edits.products import ACTIVATIONS
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
    names = ACTIVATIONS.get(text(node, "activation", ""), ())
    _activate(b, node, product, dict(zip(names, params, strict=False)))


def _subset(node: Node, names: tuple[str, ...]) -> dict[str, AttributeValue]:
    return {name: node.attributes[name] for name in names if name in node.attributes}


def _activate(b: LoweringBuilder, node: Node, value: str, values: dict[str, float]) -> None:
    activation = text(node, "activation", "")
    if not activation:
        b.op("Identity", value, result=node.outputs[0])
        return
    if activation not in ACTIVATIONS:
        raise b.refuse(node, f"the activation '{activation}' is not known")
    known = {name: values[name] for name in ACTIVATIONS[activation] if name in values}
    b.write(activation, (value,), node.outputs, known)


# -- other forms of standard operators ---------------------------------------------------------


@lowering("com.microsoft::GatherND", "com.microsoft::Trilu")
def renamed(b: LoweringBuilder, node: Node) -> None:
    """Write the node as the standard operator with the same name."""
    b.write(node.op, node.inputs, node.outputs, node.attributes)


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


# -- products with weights of four or eight bits ---------------------------------------------------


# Levels up to this one leave the operands in single precision.
_SINGLE = 1


@lowering("com.microsoft::MatMulNBits")
def matmul_n_bits(b: LoweringBuilder, node: Node) -> None:
    """Write the product without the rounding of ``A`` that some accuracy levels allow."""
    if integer(node, "accuracy_level", 0) <= _SINGLE:
        raise b.refuse(node, "it has a derivative rule")
    attributes = {**node.attributes, "accuracy_level": _SINGLE}
    b.write(node.op, node.inputs, node.outputs, attributes, node.domain)


_TO_HEADS = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class _Form:
    """The options that all attention operators have."""

    scale: float  # factor of the scores; zero for 1 / √size
    masked: float = 0.0  # number that is added to the score of a padding key
    causal: bool = False  # whether a query cannot see later keys
    window: int = -1  # number of visible keys before the position of the query; negative for all
    softcap: float = 0.0  # soft upper limit of the scores; zero for no limit


# Operands in the order of the schemas. A minus marks those that are refused.
_OPERANDS = {
    "Attention": "input weights bias mask_index -past attention_bias -past_sequence_length",
    "MultiHeadAttention": "query key value bias key_padding_mask attention_bias past_key "
    "past_value -past_sequence_length -cache_indirection",
    # Without a past state, ONNX Runtime requires that total_sequence_length is the number of keys.
    "GroupQueryAttention": "query key value -past_key -past_value seqlens_k total_sequence_length "
    "cos_cache sin_cache position_ids attention_bias -head_sink -k_scale -v_scale -q_norm_weight "
    "-k_norm_weight -query_seqlens",
}


@lowering("com.microsoft::Attention")
def attention(b: LoweringBuilder, node: Node) -> None:
    """Write attention, after projections to queries, keys and values by one matrix."""
    x, weights, bias, mask, added = _operands(b, node)
    y, present = (*node.outputs, "")[:2]
    if integer(node, "do_rotary", 0):
        raise b.refuse(node, "rotary embedding is not supported")
    heads = integer(node, "num_heads", 1)
    whole = b.facts[weights].shape[1]
    sizes = integers(node, "qkv_hidden_sizes", (whole // 3,) * 3)
    projected = b.op("MatMul", x, weights)
    projected = b.op("Add", projected, bias) if bias else projected
    parts = b.split(projected, sizes, axis=-1)
    q, k, v = (_heads(b, part, heads) for part in parts)
    form = _padded_form(node)
    _attend(b, node, (q, k, v), form, [_padding(b, node, mask, k, form), added], y)
    if present:
        front = b.constant([0])
        pair = [b.op("Unsqueeze", part, front) for part in (k, v)]
        b.op("Concat", *pair, result=present, axis=0)


@lowering("com.microsoft::MultiHeadAttention")
def multi_head_attention(b: LoweringBuilder, node: Node) -> None:
    """Write attention of projected queries, keys and values."""
    query, key, value, bias, mask, added, past_k, past_v = _operands(b, node)
    y, present_k, present_v, scores = (*node.outputs, "", "", "")[:4]
    if scores:
        raise b.refuse(node, "scores as a result are not supported")
    heads = integer(node, "num_heads", 1)
    q, k, v = _projected(b, node, (query, key, value), bias, heads)
    if past_k:
        k, v = (b.op("Concat", past, new, axis=2) for past, new in ((past_k, k), (past_v, v)))
    _present(b, (k, present_k), (v, present_v))
    form = _padded_form(node)
    _attend(b, node, (q, k, v), form, [_padding(b, node, mask, k, form), added], y)


@lowering("com.microsoft::GroupQueryAttention")
def group_query_attention(b: LoweringBuilder, node: Node) -> None:
    """Write causal attention in which groups of heads share keys and values.

    No query sees the keys after the end of a sequence.
    """
    query, key, value, lengths, _, cos, sin, ids, added = _operands(b, node)
    y, present_k, present_v, scores = (*node.outputs, "", "", "")[:4]
    if scores or integer(node, "smooth_softmax", 0):
        raise b.refuse(node, "scores as a result, or the option smooth_softmax, are not supported")
    heads, shared = integer(node, "num_heads", 1), integer(node, "kv_num_heads", 1)
    q, k, v = _grouped(b, (query, key, value), heads, shared)
    if integer(node, "do_rotary", 0):
        # Without a past state, the kernel reads the first position id alone.
        first = b.op("Reshape", ids, b.constant([-1])) if ids else ""
        first = b.op("Gather", first, b.constant([0])) if ids else ""
        waves = angles(b, cos, sin, consecutive(b, first, q))
        width = 2 * b.facts[cos].shape[-1]
        interleaved = bool(integer(node, "rotary_interleaved", 0))
        q, k = (rotated(b, part, waves, width, interleaved) for part in (q, k))
    _present(b, (k, present_k), (v, present_v))
    form = _Form(
        scale=number(node, "scale", 0.0),
        causal=bool(integer(node, "causal", 1)),
        window=integer(node, "local_window_size", -1),
        softcap=number(node, "softcap", 0.0),
    )
    k, v = (_repeated(b, part, heads // shared) for part in (k, v))
    ends = b.op("Add", b.cast(lengths, "int64"), b.constant(1))
    _attend(b, node, (q, k, v), form, [added], y, ends)


def _operands(b: LoweringBuilder, node: Node) -> list[str]:
    """Refuse unsupported operands; return the names of the others, ``""`` for omitted ones."""
    names = _OPERANDS[node.op].split()
    values = (*node.inputs, *[""] * len(names))[: len(names)]
    for name, value in zip(names, values, strict=True):
        if name.startswith("-") and value:
            raise b.refuse(node, f"its operand '{name[1:]}' is not supported")
    return [value for name, value in zip(names, values, strict=True) if name[0] != "-"]


def _padded_form(node: Node) -> _Form:
    return _Form(
        scale=number(node, "scale", 0.0),
        masked=number(node, "mask_filter_value", -10000.0),
        causal=bool(integer(node, "unidirectional", 0)),
    )


def _present(b: LoweringBuilder, *pairs: tuple[str, str]) -> None:
    """Write keys and values as results, where the node has them."""
    for part, result in pairs:
        if result:
            b.op("Identity", part, result=result)


# -- heads -----------------------------------------------------------------------------------------


def _projected(
    b: LoweringBuilder, node: Node, operands: tuple[str, ...], bias: str, heads: int
) -> tuple[str, str, str]:
    """Write the heads of queries, keys and values; keys and values may already be heads."""
    ranks = [len(b.facts[name].shape) if name else 0 for name in operands]
    if ranks not in ([3, 3, 3], [3, 4, 4]) or (bias and ranks[1] == 4):
        raise b.refuse(node, "packed operands are not supported")
    parts = list(operands)
    if bias:
        shifts = b.split(bias, [b.facts[name].shape[-1] for name in operands], axis=0)
        parts = [b.op("Add", x, shift) for x, shift in zip(operands, shifts, strict=True)]
    q, k, v = (
        _heads(b, part, heads) if rank == 3 else part
        for part, rank in zip(parts, ranks, strict=True)
    )
    return q, k, v


def _grouped(
    b: LoweringBuilder, operands: tuple[str, str, str], heads: int, shared: int
) -> tuple[str, str, str]:
    """Write the heads of queries, keys and values, which one operand may contain together."""
    query, key, value = operands
    if not key:
        size = b.facts[query].shape[-1] // (heads + 2 * shared)
        sizes = [heads * size, shared * size, shared * size]
        query, key, value = b.split(query, sizes, axis=-1)
    return _heads(b, query, heads), _heads(b, key, shared), _heads(b, value, shared)


def _heads(b: LoweringBuilder, x: str, heads: int) -> str:
    """Write ``(n, length, heads · size)`` as heads."""
    split = b.op("Reshape", x, b.constant([0, 0, heads, -1]))
    return b.op("Transpose", split, perm=_TO_HEADS)


def _merged(b: LoweringBuilder, x: str, result: str) -> None:
    """Write heads as ``(n, length, heads · size)``."""
    transposed = b.op("Transpose", x, perm=_TO_HEADS)
    b.op("Reshape", transposed, b.constant([0, 0, -1]), result=result)


def _repeated(b: LoweringBuilder, x: str, times: int) -> str:
    """Write each head ``times`` times."""
    if times == 1:
        return x
    apart = b.op("Unsqueeze", x, b.constant([2]))
    wide = b.op("Concat", *[apart] * times, axis=2)
    shape = b.op("Shape", x, start=2)
    return b.op("Reshape", wide, b.op("Concat", b.constant([0, -1]), shape, axis=0))


# -- scores ----------------------------------------------------------------------------------------


def _attend(
    b: LoweringBuilder,
    node: Node,
    heads: tuple[str, str, str],
    form: _Form,
    added: list[str],
    result: str,
    ends: str = "",
) -> None:
    """Write ``softmax(scale · q kᵀ + added) v`` with merged heads.

    ``ends`` has the number of visible keys of each example; ``""`` for all.
    """
    q, k, v = heads
    like = node.inputs[0]
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=(0, 1, 3, 2)))
    if form.scale:
        scores = b.op("Mul", scores, b.scalar(form.scale, like))
    else:
        size = b.op("CastLike", b.op("Shape", k, start=3, end=4), like)
        scores = b.op("Div", scores, b.op("Sqrt", size))
    if form.softcap:
        cap = b.scalar(form.softcap, like)
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap)
    for part in added:
        scores = b.op("Add", scores, part) if part else scores
    visible = _visible(b, q, k, form.window) if form.causal else ""
    if ends:
        valid = _before(b, k, ends)
        visible = b.op("And", visible, valid) if visible else valid
    if visible:
        lowest = b.scalar(float(np.finfo(b.facts[like].dtype).min), like)
        scores = b.op("Where", visible, scores, lowest)
    weights = b.op("Softmax", scores, axis=-1)
    if ends and form.window >= 0:  # a query after the end of its sequence may see no key
        weights = b.op("Where", visible, weights, b.scalar(0.0, like))
    _merged(b, b.op("MatMul", weights, v), result)


def _before(b: LoweringBuilder, k: str, ends: str) -> str:
    """Write a mask ``(n, 1, 1, keys)`` of the keys before the end of each example."""
    length = b.op("Squeeze", b.op("Shape", k, start=2, end=3))
    every = b.op("Range", b.constant(0), length, b.constant(1))
    return b.op("Less", every, b.op("Reshape", ends, b.constant([-1, 1, 1, 1])))


def _visible(b: LoweringBuilder, q: str, k: str, window: int) -> str:
    """Write a mask of visible keys (last axis), without later keys and keys before the window."""
    queries, keys = (b.op("Squeeze", b.op("Shape", x, start=2, end=3)) for x in (q, k))
    zero, one = b.constant(0), b.constant(1)
    last = b.op("Range", b.op("Sub", keys, queries), keys, one)
    last = b.op("Unsqueeze", last, b.constant([1]))
    every = b.op("Range", zero, keys, one)
    visible = b.op("LessOrEqual", every, last)
    if window < 0:
        return visible
    recent = b.op("Greater", every, b.op("Sub", last, b.constant(window)))
    return b.op("And", visible, recent)


def _padding(b: LoweringBuilder, node: Node, mask: str, k: str, form: _Form) -> str:
    """Write the number that is added to the score of each key; return ``""`` without a mask."""
    # A mask contains lengths (n), or zeros for padding in (n, keys) or (n, queries, keys).
    if not mask:
        return ""
    shape, like = b.facts[mask].shape, node.inputs[0]
    if len(shape) == 1:
        if shape != b.facts[like].shape[:1]:
            raise b.refuse(node, f"a mask of shape {shape} is not supported")
        valid = _before(b, k, b.cast(mask, "int64"))
    elif len(shape) in {2, 3}:
        apart = b.constant([1, 2] if len(shape) == 2 else [1])
        valid = b.op("Greater", b.op("Unsqueeze", mask, apart), b.constant(0, "int32"))
    else:
        raise b.refuse(node, f"a mask of shape {shape} is not supported")
    return b.op("Where", valid, b.scalar(0.0, like), b.scalar(form.masked, like))


@lowering("com.microsoft::RotaryEmbedding")
def rotary_embedding(b: LoweringBuilder, node: Node) -> None:
    """Write a rotation of pairs of features by an angle proportional to the position."""
    x, ids, cos, sin = node.inputs
    if integer(node, "is_packed_batching", 0):
        raise b.refuse(node, "packed batches are not supported")
    shape, size = b.facts[x].shape, 2 * b.facts[cos].shape[-1]
    heads, flat = integer(node, "num_heads", 0) or shape[-1] // size, len(shape) == 3
    split = _heads(b, x, heads) if flat else x
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

    ``first`` is a value with one element, or ``""`` for zero.
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
    """Write heads ``(n, heads, length, size)`` with their first ``width`` features rotated.

    ``waves`` are the names of cosine and sine. If ``interleaved``, a pair is two adjacent features,
    otherwise one feature from each half.
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
