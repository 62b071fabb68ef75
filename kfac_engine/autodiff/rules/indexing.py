"""Differentiates operators that select, replace or add entries by index, condition or length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, text
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


def rearranged(b: VjpBuilder, node: Node, g: str, *, narrow: bool = False) -> str:
    """Write the adjoint of an operator that selects entries of its first operand.

    The same operator on the indices of the entries computes the origin of each result, so the
    operator must support integers; ``narrow`` says that ONNX Runtime supports int32 and not int64.
    """
    x, *others = node.inputs
    elements = numbers(b, x)
    if narrow:
        elements = b.forward("Cast", elements, to=_INT32)
    sources = b.repeat(node, elements, *others)[0]
    return added(b, x, sources, g)


def added(b: VjpBuilder, x: str, places: str, g: str) -> str:
    """Write ``x``'s cotangent: each entry of ``g`` is added at its row-major index in ``x``."""
    flat = [b.op("Reshape", value, b.constant([-1])) for value in (b.zeros(x), places, g)]
    return b.reshape_like(b.op("ScatterElements", *flat, axis=0, reduction="add"), x)


_INT32 = 6  # TensorProto.INT32


def numbers(b: VjpBuilder, x: str) -> str:
    """Write the row-major index of each entry of the forward value ``x``, int64."""
    size = b.forward("ReduceProd", b.shape(x), keepdims=0)
    line = b.indices(size)
    return b.forward("Reshape", line, b.shape(x))


@vjp_rule("Gather")
def gather(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return a cotangent of the data: each slice adds its cotangent where it was read."""
    x, indices = node.inputs
    axis = integer(node, "axis", 0) % b.rank(x)
    if axis == 0 and b.rank(x) > 1:
        return {0: _added_rows(b, x, indices, g[0])}
    # The indices are flattened along the gathered axis, so that updates have the rank of the
    # operand.
    before, after = [0] * axis, range(axis + 1, b.rank(x))
    behind = b.forward("Gather", b.shape(x), b.constant(after, "int64"))
    shape = b.forward("Concat", b.constant([*before, -1]), behind, axis=0)
    updates = b.op("Reshape", g[0], shape)
    line = b.op("Reshape", indices, b.constant([1] * axis + [-1] + [1] * len(after)))
    places = b.op("Expand", line, b.op("Shape", updates))
    return {0: b.op("ScatterElements", b.zeros(x), places, updates, axis=axis, reduction="add")}


def _added_rows(b: VjpBuilder, x: str, indices: str, g: str) -> str:
    """Add the rows of ``g`` where they were read in a table ``x``, entry by entry."""
    # ScatterElements on a flat vector takes 14 ms for 2048 rows of 256 numbers, and 37 ms on a
    # table. Negative indices remain correct.
    everything = b.constant([-1])
    width = b.forward("ReduceProd", b.forward("Shape", x, start=1), keepdims=0)
    column = b.op("Reshape", b.op("Cast", indices, to=_INT64), b.constant([-1, 1]))
    along = b.op("Range", b.constant(0), width, b.constant(1))
    places = b.op("Reshape", b.op("Add", b.op("Mul", column, width), along), everything)
    # Of a size that is known when the graph runs: a session would store zeros of a constant size.
    size = b.forward("ReduceProd", b.forward("Shape", x))
    zeros = b.op("ConstantOfShape", size, value=np.zeros(1, dtype=b.dtype(x)))
    updates = b.op("Reshape", g, everything)
    added = b.op("ScatterElements", zeros, places, updates, axis=0, reduction="add")
    return b.reshape_like(added, x)


_INT64 = 7  # TensorProto.INT64


@vjp_rule("GatherElements")
def gather_elements(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Add the cotangent of each entry where the entry was read."""
    x, indices = node.inputs
    axis = integer(node, "axis", 0)
    return {0: b.op("ScatterElements", b.zeros(x), indices, g[0], axis=axis, reduction="add")}


@vjp_rule("TopK")
def top_k(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Add the cotangent of each entry where the entry was read."""
    x = node.inputs[0]
    named = node.outputs[1:]
    winners = named[0] if any(named) else b.repeat(node, *node.inputs, outputs=2)[1]
    axis = integer(node, "axis", -1)
    return {0: b.op("ScatterElements", b.zeros(x), winners, g[0], axis=axis, reduction="add")}


# -- selection by condition, length or value -------------------------------------------------------


@vjp_rule("Compress", "GatherND")
def selection(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Add the cotangent of each entry or slice where it was read."""
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
    shown = b.op("Mul", g[0], b.forward("OneHot", indices, depth, bits, axis=axis))
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
        count = b.forward("Squeeze", b.shape(y))
        numbers = b.indices(count)
        steps = b.op("Mul", g[0], b.cast_like(numbers, start))
        gradients[2] = b.op("ReduceSum", steps, keepdims=0)
    return gradients


# -- replacement and addition by index -------------------------------------------------------------
#
# The rules for products and extrema flatten every operand and compute the target index of each
# update. ScatterElements and ScatterND then have the same form.


@vjp_rule("ScatterElements", "ScatterND")
def scatter(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Gather the cotangents of updates from their targets, by the kind of reduction."""
    x, indices, updates = node.inputs
    gather, along = "GatherND", {}
    if node.op == "ScatterElements":
        gather, along = "GatherElements", {"axis": integer(node, "axis", 0)}
    reduction = text(node, "reduction", "none")
    if reduction in _REDUCED:
        return _reduced(b, node, g[0], b.forward(gather, numbers(b, x), indices, **along))
    gradients = {0: g[0]}
    if 0 in wanted and reduction == "none":
        gradients[0] = b.write(node.op, (g[0], indices, b.zeros(updates)), ("",), along)[0]
    if 2 in wanted:
        gradients[2] = b.write(gather, (g[0], indices), ("",), along)[0]
    return gradients


@vjp_rule("TensorScatter")
def tensor_scatter(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Return the cotangent of the update at its target, and zero for replaced entries."""
    cache, update, *start = node.inputs
    gradients = {}
    if 0 in wanted:
        gradients[0] = b.op(
            "TensorScatter", g[0], b.zeros(update), *start,
            axis=integer(node, "axis", -2), mode=text(node, "mode", "linear"),
        )  # fmt: skip
    if 1 in wanted:
        # The index of each result in the update, and −1 for results of the cache.
        nowhere = b.forward("Expand", b.constant(-1), b.shape(cache))
        sources = b.repeat(node, nowhere, numbers(b, update), *start)[0]
        size = b.forward("ReduceProd", b.shape(update))
        longer = b.op(
            "ConstantOfShape",
            b.forward("Add", size, b.constant(1)),
            value=np.zeros(1, b.dtype(update)),
        )
        flat = (b.op("Reshape", value, b.constant([-1])) for value in (sources, g[0]))
        summed = b.op("ScatterElements", longer, *flat, axis=0, reduction="add")
        gradients[1] = b.reshape_like(
            b.op("Slice", summed, b.constant([0]), b.constant([-1])), update
        )
    return gradients


# -- products and extrema --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """Operands, result and cotangent as flat vectors, with the target index of each update."""

    x: str
    y: str
    updates: str
    g: str
    places: str

    def at_updates(self, b: VjpBuilder, value: str) -> str:
        """Write the entries of a value at the targets of the updates."""
        return b.op("GatherElements", value, self.places, axis=0)

    def scattered(self, b: VjpBuilder, value: str, updates: str, reduction: str) -> str:
        """Write the scatter operation on other vectors."""
        return b.op("ScatterElements", value, self.places, updates, axis=0, reduction=reduction)


def _reduced(b: VjpBuilder, node: Node, g: str, places: str) -> Gradients:
    x, _, updates = node.inputs
    parts = (x, node.outputs[0], updates, g, places)
    line = _Line(*(b.op("Reshape", part, b.constant([-1])) for part in parts))
    gx, gu = _REDUCED[text(node, "reduction", "")](b, line, x)
    return {0: b.reshape_like(gx, x), 2: b.reshape_like(gu, updates)}


def _of_product(b: VjpBuilder, line: _Line, like: str) -> tuple[str, str]:
    """Write the products of the *other* factors, without division by zero."""
    zero, one = b.scalar(0, like), b.scalar(1, like)
    factors = (line.x, line.updates)
    is_zero = [b.op("Equal", factor, zero) for factor in factors]
    filled = [b.op("Where", mask, one, f) for mask, f in zip(is_zero, factors, strict=True)]
    count = [b.cast_like(mask, like) for mask in is_zero]
    product, zeros = (
        line.scattered(b, values[0], values[1], how)
        for values, how in ((filled, "mul"), (count, "add"))
    )
    gx = _of_factor(b, (line.g, product, zeros), filled[0], count[0], like)
    seen = [line.at_updates(b, value) for value in (line.g, product, zeros)]
    return gx, _of_factor(b, (seen[0], seen[1], seen[2]), filled[1], count[1], like)


def _of_factor(
    b: VjpBuilder, seen: tuple[str, str, str], filled: str, is_zero: str, like: str
) -> str:
    g, product, zeros = seen
    none_else = b.cast_like(b.op("Equal", zeros, is_zero), like)
    return b.op("Mul", g, b.op("Mul", none_else, b.op("Div", product, filled)))


def _of_extremum(b: VjpBuilder, line: _Line, like: str) -> tuple[str, str]:
    """Write the cotangent, divided among equal extrema."""
    won = b.cast_like(b.op("Equal", line.x, line.y), like)
    update_won = b.cast_like(b.op("Equal", line.updates, line.at_updates(b, line.y)), like)
    share = b.op("Div", line.g, line.scattered(b, won, update_won, "add"))
    return b.op("Mul", share, won), b.op("Mul", line.at_updates(b, share), update_won)


_REDUCED: Mapping[str, Callable[[VjpBuilder, _Line, str], tuple[str, str]]] = {
    "mul": _of_product,
    "max": _of_extremum,
    "min": _of_extremum,
}
