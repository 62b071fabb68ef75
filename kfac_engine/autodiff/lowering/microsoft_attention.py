"""Attention operators of ONNX Runtime's own, taken apart into products and Softmax.

Heads are laid out as ``(n, heads, length, size)`` throughout.
"""

from dataclasses import dataclass

import numpy as np

from kfac_engine.autodiff.lowering import lowering
from kfac_engine.autodiff.lowering.microsoft_rotary import angles, positions, rotated
from kfac_engine.autodiff.lowering.pen import Pen
from kfac_engine.autodiff.rules.attributes import integer, integers, number
from kfac_engine.graph.structure import Node

_TO_HEADS = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the operators do in common.

    Attributes:
        scale: Factor of the scores; zero stands for 1 / √size.
        masked: What is added to the score of a key that is padding.
        causal: Whether a query sees no later key.
        window: How many keys before its own a query sees; negative for all.
        softcap: Scores are bent to stay below this; zero for not at all.
    """

    scale: float
    masked: float = -10000.0
    causal: bool = False
    window: int = -1
    softcap: float = 0.0


@lowering("com.microsoft::Attention")
def attention(pen: Pen, node: Node) -> None:
    """Projections to queries, keys and values by one matrix, then attention."""
    x, weights, bias, mask, past, added, _ = (*node.inputs, *[""] * 7)[:7]
    y, present = (*node.outputs, "")[:2]
    if past or integer(node, "do_rotary", 0):
        raise pen.refuse(node, "a past state or rotary embedding is not covered")
    heads = integer(node, "num_heads", 1)
    whole = pen.facts[weights].shape[1]
    sides = integers(node, "qkv_hidden_sizes", (whole // 3,) * 3)
    projected = pen.op("MatMul", x, weights)
    projected = pen.op("Add", projected, bias) if bias else projected
    parts = pen.multi("Split", [projected, pen.constant(sides)], ("", "", ""), axis=-1)
    q, k, v = (_heads(pen, part, heads) for part in parts)
    form = _Form(
        scale=number(node, "scale", 0.0),
        masked=number(node, "mask_filter_value", -10000.0),
        causal=bool(integer(node, "unidirectional", 0)),
    )
    _attend(pen, node, (q, k, v), form, [_padding(pen, node, mask, k, form), added], y)
    if present:
        front = pen.constant([0])
        pair = [pen.op("Unsqueeze", part, front) for part in (k, v)]
        pen.op("Concat", *pair, to=present, axis=0)


@lowering("com.microsoft::MultiHeadAttention")
def multi_head_attention(pen: Pen, node: Node) -> None:
    """Attention of queries, keys and values that are projected already."""
    query, key, value, bias, mask, added, past_k, past_v, *cache = (*node.inputs, *[""] * 9)[:10]
    y, present_k, present_v, scores = (*node.outputs, "", "", "")[:4]
    if any(cache) or scores:
        raise pen.refuse(node, "a shared cache, or scores as a result, are not covered")
    heads = integer(node, "num_heads", 1)
    q, k, v = _projected(pen, node, (query, key, value), bias, heads)
    if past_k:
        k, v = (pen.op("Concat", past, new, axis=2) for past, new in ((past_k, k), (past_v, v)))
    for part, result in ((k, present_k), (v, present_v)):
        if result:
            pen.op("Identity", part, to=result)
    form = _Form(
        scale=number(node, "scale", 0.0),
        masked=number(node, "mask_filter_value", -10000.0),
        causal=bool(integer(node, "unidirectional", 0)),
    )
    _attend(pen, node, (q, k, v), form, [_padding(pen, node, mask, k, form), added], y)


@lowering("com.microsoft::GroupQueryAttention")
def group_query_attention(pen: Pen, node: Node) -> None:
    """Causal attention from the first token on, several heads sharing keys and values.

    All examples of a batch have the same length: what follows the end of one has no meaning.
    """
    given = dict(zip(_GROUP_OPERANDS, node.inputs, strict=False))
    y, present_k, present_v, scores = (*node.outputs, "", "", "")[:4]
    beyond = [name for name in given if name not in _GROUP_COVERED and given[name]]
    if beyond or scores or integer(node, "smooth_softmax", 0):
        raise pen.refuse(node, f"{', '.join(beyond) or 'a result or option'} is not covered")
    heads, shared = integer(node, "num_heads", 1), integer(node, "kv_num_heads", 1)
    q, k, v = _grouped(pen, given, heads, shared)
    if integer(node, "do_rotary", 0):
        places = positions(pen, given.get("position_ids", ""), q)
        waves = angles(pen, given["cos_cache"], given["sin_cache"], places)
        width = 2 * pen.facts[given["cos_cache"]].shape[-1]
        interleaved = bool(integer(node, "rotary_interleaved", 0))
        q, k = (rotated(pen, part, waves, width, interleaved) for part in (q, k))
    for part, result in ((k, present_k), (v, present_v)):
        if result:
            pen.op("Identity", part, to=result)
    form = _Form(
        scale=number(node, "scale", 0.0),
        causal=bool(integer(node, "causal", 1)),
        window=integer(node, "local_window_size", -1),
        softcap=number(node, "softcap", 0.0),
    )
    k, v = (_repeated(pen, part, heads // shared) for part in (k, v))
    _attend(pen, node, (q, k, v), form, [given.get("attention_bias", "")], y)


_GROUP_COVERED = (
    "query", "key", "value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias",
)  # fmt: skip
_GROUP_OPERANDS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
    "q_norm_weight", "k_norm_weight",
)  # fmt: skip


# -- heads -----------------------------------------------------------------------------------------


def _projected(
    pen: Pen, node: Node, operands: tuple[str, ...], bias: str, heads: int
) -> tuple[str, str, str]:
    """Heads of queries, keys and values; keys and values may come in heads already."""
    ranks = [len(pen.facts[name].shape) if name else 0 for name in operands]
    if ranks not in ([3, 3, 3], [3, 4, 4]) or (bias and ranks[1] == 4):
        raise pen.refuse(node, "packed operands are not covered")
    parts = list(operands)
    if bias:
        sides = pen.constant([pen.facts[name].shape[-1] for name in operands])
        shifts = pen.multi("Split", [bias, sides], ("", "", ""), axis=0)
        parts = [pen.op("Add", x, b) for x, b in zip(operands, shifts, strict=True)]
    q, k, v = (
        _heads(pen, part, heads) if rank == 3 else part
        for part, rank in zip(parts, ranks, strict=True)
    )
    return q, k, v


def _grouped(pen: Pen, given: dict[str, str], heads: int, shared: int) -> tuple[str, str, str]:
    """Heads of queries, keys and values; all in the first operand if it is alone."""
    query, key, value = given["query"], given.get("key", ""), given.get("value", "")
    if not key:
        size = pen.facts[query].shape[-1] // (heads + 2 * shared)
        sides = pen.constant([heads * size, shared * size, shared * size])
        query, key, value = pen.multi("Split", [query, sides], ("", "", ""), axis=-1)
    return _heads(pen, query, heads), _heads(pen, key, shared), _heads(pen, value, shared)


def _heads(pen: Pen, x: str, heads: int) -> str:
    """``(n, length, heads · size)`` with the heads as an axis of their own."""
    split = pen.op("Reshape", x, pen.constant([0, 0, heads, -1]))
    return pen.op("Transpose", split, perm=_TO_HEADS)


def _merged(pen: Pen, x: str, to: str) -> None:
    """The heads behind one another again."""
    turned = pen.op("Transpose", x, perm=_TO_HEADS)
    pen.op("Reshape", turned, pen.constant([0, 0, -1]), to=to)


def _repeated(pen: Pen, x: str, times: int) -> str:
    """Each head ``times`` times in a row."""
    if times == 1:
        return x
    apart = pen.op("Unsqueeze", x, pen.constant([2]))
    wide = pen.op("Concat", *[apart] * times, axis=2)
    sides = pen.op("Shape", x, start=2)
    return pen.op("Reshape", wide, pen.op("Concat", pen.constant([0, -1]), sides, axis=0))


# -- scores ----------------------------------------------------------------------------------------


def _attend(
    pen: Pen, node: Node, heads: tuple[str, str, str], form: _Form, added: list[str], to: str
) -> None:
    """``softmax(scale · q kᵀ + added) v``, heads merged."""
    q, k, v = heads
    like = node.inputs[0]
    scores = pen.op("MatMul", q, pen.op("Transpose", k, perm=(0, 1, 3, 2)))
    if form.scale:
        scores = pen.op("Mul", scores, pen.scalar(form.scale, like))
    else:
        size = pen.op("CastLike", pen.op("Shape", k, start=3, end=4), like)
        scores = pen.op("Div", scores, pen.op("Sqrt", size))
    if form.softcap:
        cap = pen.scalar(form.softcap, like)
        scores = pen.op("Mul", pen.op("Tanh", pen.op("Div", scores, cap)), cap)
    for part in added:
        scores = pen.op("Add", scores, part) if part else scores
    if form.causal:
        lowest = pen.scalar(float(np.finfo(pen.facts[like].dtype).min), like)
        scores = pen.op("Where", _visible(pen, q, k, form.window), scores, lowest)
    _merged(pen, pen.op("MatMul", pen.op("Softmax", scores, axis=-1), v), to)


def _visible(pen: Pen, q: str, k: str, window: int) -> str:
    """Which keys (along the last axis) a query sees: none that is later, or too long ago."""
    queries, keys = (pen.op("Squeeze", pen.op("Shape", x, start=2, end=3)) for x in (q, k))
    zero, one = pen.constant(0), pen.constant(1)
    own = pen.op("Range", pen.op("Sub", keys, queries), keys, one)
    own = pen.op("Unsqueeze", own, pen.constant([1]))
    every = pen.op("Range", zero, keys, one)
    visible = pen.op("LessOrEqual", every, own)
    if window < 0:
        return visible
    recent = pen.op("Greater", every, pen.op("Sub", own, pen.constant(window)))
    return pen.op("And", visible, recent)


def _padding(pen: Pen, node: Node, mask: str, k: str, form: _Form) -> str:
    """What is added to scores for keys that are padding; empty without a mask."""
    # Masks are lengths (n), or zero for padding in (n, keys) or (n, queries, keys).
    if not mask:
        return ""
    shape, like = pen.facts[mask].shape, node.inputs[0]
    if len(shape) == 1:
        if shape != pen.facts[like].shape[:1]:
            raise pen.refuse(node, f"a mask of shape {shape} is not covered")
        length = pen.op("Squeeze", pen.op("Shape", k, start=2, end=3))
        every = pen.op("Range", pen.constant(0), length, pen.constant(1))
        ends = pen.op("Unsqueeze", pen.cast(mask, "int64"), pen.constant([1, 2, 3]))
        kept = pen.op("Less", every, ends)
    elif len(shape) in {2, 3}:
        apart = pen.constant([1, 2] if len(shape) == 2 else [1])
        kept = pen.op("Greater", pen.op("Unsqueeze", mask, apart), pen.constant(0, "int32"))
    else:
        raise pen.refuse(node, f"a mask of shape {shape} is not covered")
    return pen.op("Where", kept, pen.scalar(0.0, like), pen.scalar(form.masked, like))
