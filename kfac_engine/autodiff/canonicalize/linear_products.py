"""Converts operators on data and weights to one form: an unscaled matrix on the right.

Exporters write the same layer in many forms. This module converts them to one form, which the
discovery of layers reads. The function and the parameters do not change. Scales move from weights
to data, and signs from parameters to results.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from string import ascii_lowercase
from typing import TypeAlias

import numpy as np

from kfac_engine.autodiff.canonicalize.weights import (
    merge_rearrangements,
    move_scales_to_data,
    rearranged_weight,
)
from kfac_engine.autodiff.lowering.builder import LoweringBuilder
from kfac_engine.autodiff.rules.attributes import integer, number, text
from kfac_engine.graph.analysis.subgraph import of_data
from kfac_engine.graph.structure import Fact, Graph, Node


@dataclass(frozen=True, slots=True)
class Letters:
    """The axes of a product: a letter for each axis of the data, the weight and the result."""

    data: str
    weight: str
    result: str

    @property
    def positions(self) -> str:
        """Position axes, in the order of the result if its first axis is one, else of the data."""
        source = self.result if self.result[:1] not in self.weight else self.data
        return "".join(letter for letter in source if letter not in self.weight)

    @property
    def summed(self) -> str:
        """Summed axes, in the order of the weight."""
        return "".join(letter for letter in self.weight if letter not in self.result)

    @property
    def features(self) -> str:
        """Feature axes, in the order of the weight."""
        return "".join(letter for letter in self.weight if letter not in self.data)

    @property
    def slots(self) -> str:
        """Slot axes, in the order of the weight."""
        return "".join(e for e in self.weight if e in self.data and e in self.result)

    def is_plain(self) -> bool:
        """Return whether the product is a batch of matrix products: no sum is over one operand."""
        strings = self.data, self.weight, self.result
        once = all(len(set(letters)) == len(letters) for letters in strings)
        positions = set(self.data) - set(self.weight) <= set(self.result)
        known = set(self.result) <= {*self.data, *self.weight}
        summed = set(self.weight) <= {*self.data, *self.result}
        return once and positions and known and summed and bool(self.positions and self.summed)


def write_product(
    b: LoweringBuilder,
    letters: Letters,
    data: str,
    weight: str,
    sizes: Mapping[str, int],
    result: str,
) -> None:
    """Write ``data · weight`` as a product with ``(slots, summed, features)``.

    Without slots the weight is a matrix. With slots the values on both sides of the product are
    also written as ``(positions, slots, summed)`` and ``(positions, slots, features)``. ``sizes``
    maps each letter of the weight to the size of its axis.
    """
    slots = [prod(sizes[letter] for letter in letters.slots)] if letters.slots else []
    k, f = (prod(sizes[e] for e in part) for part in (letters.summed, letters.features))
    leading = len(letters.positions)
    order = letters.slots + letters.summed
    rows = _transposed(b, data, letters.data, letters.positions + order)
    rows = _reshaped(b, rows, leading, order, [*slots, k])
    matrix = _transposed(b, weight, letters.weight, order + letters.features)
    matrix = _reshaped(b, matrix, 0, order + letters.features, [*slots, k, f])
    order = letters.slots + letters.features
    product = _slotwise(b, rows, matrix, leading) if slots else b.op("MatMul", rows, matrix)
    if len(order) != len(slots) + 1:
        apart = b.constant([*[0] * leading, *(sizes[letter] for letter in order)])
        product = b.op("Reshape", product, apart)
    _transposed(b, product, letters.positions + order, letters.result)
    b.nodes[-1] = replace(b.nodes[-1], outputs=(result,))


def _slotwise(b: LoweringBuilder, rows: str, matrix: str, leading: int) -> str:
    """Write the product of ``(positions, slots, summed)`` and a matrix for each slot."""
    # The permutation exchanges the last position axis and the slots, and equals its inverse.
    swap = (*range(leading - 1), leading, leading - 1, leading + 1)
    rows = b.op("Transpose", rows, perm=swap)
    return b.op("Transpose", b.op("MatMul", rows, matrix), perm=swap)


def _transposed(b: LoweringBuilder, value: str, letters: str, wanted: str) -> str:
    if letters == wanted:
        return value
    return b.op("Transpose", value, perm=tuple(letters.index(letter) for letter in wanted))


def _reshaped(
    b: LoweringBuilder, value: str, leading: int, merged: str, sizes: Sequence[int]
) -> str:
    if len(merged) == len(sizes):
        return value
    return b.op("Reshape", value, b.constant([*[0] * leading, *sizes]))


# Function that rewrites a node whose operand at the index is a weight. It adds no node if the node
# needs no rewrite.
_Rewrite: TypeAlias = Callable[[LoweringBuilder, Node, int], None]

_SCALE_PER_CHANNEL = 21  # operator set from which GroupNormalization has a scale for each channel


def plain_products(graph: Graph, facts: Mapping[str, Fact], parameters: Set[str]) -> Graph:
    """Return a graph of the same function in which products with ``parameters`` have one form.

    The result is ``graph`` itself if no product changes.
    """
    graph = merge_rearrangements(graph, parameters)
    graph, facts = move_scales_to_data(graph, facts, parameters)
    weights, data = rearranged_weight(graph, parameters), of_data(graph)
    written: dict[str, Sequence[Node]] = {}
    constants = dict(graph.constants)
    for node in graph.nodes:
        rewrite = None if node.domain else _REWRITES.get(node.op)
        places = [place for place, name in enumerate(node.inputs[:2]) if name in weights]
        if rewrite and len(places) == 1 and node.inputs[1 - places[0]] in data:
            b = LoweringBuilder(graph, facts, f"{node.name}/plain/")
            rewrite(b, node, places[0])
            if b.nodes:
                written[node.name] = b.nodes
                constants |= b.constants
    if not written:
        return graph
    nodes = tuple(new for node in graph.nodes for new in written.get(node.name, (node,)))
    return replace(graph, nodes=nodes, constants=constants)


def _gemm(b: LoweringBuilder, node: Node, index: int) -> None:
    """Write ``α·op(A)·op(B) + β·C`` with the weight on the right and transposed data.

    With a bias the form is ``β·(x·W + C)``, where ``x`` is the data times ``α / β``.
    """
    alpha, beta = number(node, "alpha", 1.0), number(node, "beta", 1.0)
    bias = node.operand(2) if beta else ""
    last = beta if bias else 1.0
    data_transposed, weight_transposed = (
        bool(integer(node, name, 0))
        for name in (("transA", "transB") if index else ("transB", "transA"))
    )
    left = index == 0  # yᵀ = x·Wᵀ + Cᵀ
    x, weight = node.inputs[1 - index], node.inputs[index]
    if not alpha or (not left and not data_transposed and alpha == last == 1):
        return
    if data_transposed != left:
        x = b.op("Transpose", x, perm=(1, 0))
    if alpha != last:
        x = b.op("Mul", x, b.scalar(alpha / last, node.inputs[0]))
    if weight_transposed != left:
        weight = b.op("Transpose", weight, perm=(1, 0))
    y = b.op("MatMul", x, weight)
    if bias:
        y = b.op("Add", y, _transposed_bias(b, bias) if left else bias)
    if left:
        y = b.op("Transpose", y, perm=(1, 0))
    if last != 1:
        b.op("Mul", y, b.scalar(last, node.inputs[0]))
    b.nodes[-1] = replace(b.nodes[-1], outputs=node.outputs)


def _transposed_bias(b: LoweringBuilder, bias: str) -> str:
    """Write the transpose of a bias, for the sum with a transposed result."""
    rank = len(b.facts[bias].shape)
    if rank == 1:
        return b.op("Unsqueeze", bias, b.constant([1]))
    return b.op("Transpose", bias, perm=(1, 0)) if rank else bias


def _matmul(b: LoweringBuilder, node: Node, index: int) -> None:
    names = node.inputs[1 - index], node.inputs[index]
    shapes = [b.facts[name].shape for name in names]
    fine = len(shapes[1]) == 2 and (index == 1 or len(shapes[0]) > 2)
    if fine or len(shapes[0]) < 2:
        return
    rank = max(len(shape) for shape in shapes)
    outer = ascii_lowercase[: rank - 2]
    inner = ("XS", "SY", "XY") if index == 1 else ("SY", "XS", "XY")
    if len(shapes[1]) == 1:  # the weight is one column
        inner = (inner[0], "S", inner[0].replace("S", ""))
    letters = Letters(*(outer + pair for pair in inner))
    _contract(b, names, shapes, letters, node.outputs[0])


def _einsum(b: LoweringBuilder, node: Node, index: int) -> None:
    equation = text(node, "equation", "").replace(" ", "")
    if len(node.inputs) != 2 or "->" not in equation or "." in equation:
        return
    operands, output = equation.split("->")
    parts = operands.split(",")
    names = node.inputs[1 - index], node.inputs[index]
    letters = Letters(parts[1 - index], parts[index], output)
    if any(len(set(part)) < len(part) for part in parts):
        return
    _contract(b, names, [b.facts[name].shape for name in names], letters, node.outputs[0])


def _contract(
    b: LoweringBuilder,
    names: tuple[str, str],
    shapes: Sequence[tuple[int, ...]],
    letters: Letters,
    result: str,
) -> None:
    """Write the product of data and a weight if a matrix product can express it."""
    data, weight = (
        dict(zip(spelled[-len(shape) :], shape, strict=True))
        for spelled, shape in zip((letters.data, letters.weight), shapes, strict=True)
    )
    # The axes of an operand exclude those along which it is broadcast.
    axes = [
        {e: size for e, size in sizes.items() if not (size == 1 and e in other and e in to_keep)}
        for sizes, other, to_keep in (
            (data, {e for e, size in weight.items() if size > 1}, letters.result),
            (weight, data, letters.result),
        )
    ]
    plain = Letters("".join(axes[0]), "".join(axes[1]), letters.result)
    alike = all(size == axes[1].get(e, size) for e, size in axes[0].items())
    if alike and plain.is_plain():
        operands = [
            _squeezed(b, name, sizes, spelled)
            for name, sizes, spelled in zip(names, (data, weight), axes, strict=True)
        ]
        write_product(b, plain, operands[0], operands[1], axes[1], result)


def _squeezed(
    b: LoweringBuilder, value: str, sizes: Mapping[str, int], letters: Mapping[str, int]
) -> str:
    """Write a value without the axes whose letters are not in ``letters``."""
    axes = [axis for axis, letter in enumerate(sizes) if letter not in letters]
    return b.op("Squeeze", value, b.constant(axes)) if axes else value


def _group_normalization(b: LoweringBuilder, node: Node, index: int) -> None:
    """Write scale and shift as separate operators if they have one number for each group."""
    if b.graph.opset >= _SCALE_PER_CHANNEL or index != 1:
        return
    x, scale, shift = node.inputs
    (groups,) = b.facts[scale].shape
    neutral = (b.constant(make(groups, b.facts[scale].dtype)) for make in (np.ones, np.zeros))
    normal = f"{node.name}/plain"
    b.nodes.append(replace(node, inputs=(x, *neutral), outputs=(normal,), name=normal))
    y = b.op("Reshape", normal, b.constant([0, groups, -1]))
    one = b.constant([1])
    y = b.op("Mul", y, b.op("Unsqueeze", scale, one))
    y = b.op("Add", y, b.op("Unsqueeze", shift, one))
    b.op("Reshape", y, b.op("Shape", normal), result=node.outputs[0])


def _subtraction(b: LoweringBuilder, node: Node, index: int) -> None:
    """Write ``x − p`` as ``0 − (p − x)``: ``p − x`` and ``p`` have the same gradient."""
    if index == 1:
        x, p = node.inputs
        zero = b.scalar(0.0, x)  # a negation would change the sign of zeros
        b.op("Sub", zero, b.op("Sub", p, x), result=node.outputs[0])


_REWRITES: Mapping[str, _Rewrite] = {
    "Einsum": _einsum,
    "Gemm": _gemm,
    "GroupNormalization": _group_normalization,
    "MatMul": _matmul,
    "Sub": _subtraction,
}
