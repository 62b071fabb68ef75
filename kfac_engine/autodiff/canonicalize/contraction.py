"""Writes a contraction of data and a weight as one matrix product.

Every axis has a letter. An axis is a *position* if the weight does not have it, *summed* if the
result does not have it, a *feature* if the data do not have it, and a *slot* (an expert, a head) if
all three have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from kfac_engine.autodiff.lowering.builder import LoweringBuilder


@dataclass(frozen=True, slots=True)
class Letters:
    """The axes of a product.

    Attributes:
        data: A letter for each axis of the data.
        weight: A letter for each axis of the weight.
        result: A letter for each axis of the result.
    """

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
        """Whether the product is a batch of matrix products, without sums over a single operand."""
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
    also written as ``(positions, slots, summed)`` and ``(positions, slots, features)``.

    Args:
        b: Receives the nodes.
        letters: Letters of the axes.
        data: Name of the data.
        weight: Name of the weight.
        sizes: Map from each letter of the weight to the size of its axis.
        result: Name of the result.
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
