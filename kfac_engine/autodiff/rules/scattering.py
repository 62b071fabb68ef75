"""Derivatives of operators that replace, add, multiply or compare entries by index.

The rules for products and extrema flatten every operand and compute the target index of each
update. ScatterElements and ScatterND then have the same form.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.autodiff.rules import Cotangents, Gradients, Wanted, vjp_rule
from kfac_engine.autodiff.rules.attributes import integer, text
from kfac_engine.autodiff.rules.indexing import numbers
from kfac_engine.autodiff.vjp_builder import VjpBuilder
from kfac_engine.graph.structure import Node


@vjp_rule("ScatterElements")
def scatter_elements(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Gather the cotangents of updates from their targets, by the kind of reduction."""
    x, indices, updates = node.inputs
    axis = integer(node, "axis", 0)
    reduction = text(node, "reduction", "none")
    if reduction in _REDUCED:
        places = b.forward("GatherElements", numbers(b, x), indices, axis=axis)[0]
        return _reduced(b, node, g[0], places)
    gradients = {0: g[0]}
    if 0 in wanted and reduction == "none":
        gradients[0] = b.op("ScatterElements", g[0], indices, b.zeros(updates), axis=axis)
    if 2 in wanted:
        gradients[2] = b.op("GatherElements", g[0], indices, axis=axis)
    return gradients


@vjp_rule("ScatterND")
def scatter_nd(b: VjpBuilder, node: Node, g: Cotangents, wanted: Wanted) -> Gradients:
    """Gather the cotangents of updates from their targets, by the kind of reduction."""
    x, indices, updates = node.inputs
    reduction = text(node, "reduction", "none")
    if reduction in _REDUCED:
        return _reduced(b, node, g[0], b.forward("GatherND", numbers(b, x), indices)[0])
    gradients = {0: g[0]}
    if 0 in wanted and reduction == "none":
        gradients[0] = b.op("ScatterND", g[0], indices, b.zeros(updates))
    if 2 in wanted:
        gradients[2] = b.op("GatherND", g[0], indices)
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
        nowhere = b.forward("Expand", b.constant(-1), b.shape(cache))[0]
        sources = b.repeat(node, nowhere, numbers(b, update), *start)[0]
        size = b.forward("ReduceProd", b.shape(update))[0]
        longer = b.op(
            "ConstantOfShape",
            b.forward("Add", size, b.constant(1))[0],
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
