"""Computes with many small arrays of a device in one kernel launch per operation.

A launch takes the host as long as a device needs for some million multiplications. The parameters
of a small network are therefore multiplied and added together, whatever their shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.kernels.small_products import Product, small_products
from kfac_engine.kernels.spans import Combination, combine, multiply_pairs, pair_products

# Largest number of multiplications of a small product; cuBLAS is faster for larger ones.
_MOST_PRODUCTS = 1 << 26
# Largest number of entries of a matrix whose iterations are computed in memory of their own.
_MOST_ENTRIES = 1 << 18

# Coefficients of the terms X, X Xᵀ X and (X Xᵀ)² X.
Polynomial = tuple[float, float, float]


class _Between(NamedTuple):
    """The arguments of ``multiply_between``."""

    left: Array
    V: Array
    right: Array
    out: Array
    scale: float


class CupyManyArrays:
    """See ``ManyArrays``."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._iterations: dict[tuple[object, ...], _Iterations] = {}
        self._between: list[_Between] = []
        self._gathers = False

    def inner_products(self, pairs: Sequence[tuple[Array, Array]]) -> Array:
        addends: Array = multiply_pairs(self._device, pairs)
        return addends

    def combine(self, combinations: Sequence[tuple[Array, float, Array, float, Array]]) -> None:
        combine(self._device, [Combination(*terms) for terms in combinations])()

    def multiply_between(
        self, left: Array, V: Array, right: Array, out: Array, scale: float
    ) -> bool:
        products = V.size * max(len(left), len(right))
        types = {array.dtype.name for array in (left, V, right, out)}
        if types != {"float32"} or products > _MOST_PRODUCTS:
            return False
        self._between.append(_Between(left, V, right, out, scale))
        if not self._gathers:
            self._multiply()
        return True

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context at whose end all products of ``multiply_between`` are computed."""
        self._gathers = True
        try:
            yield
            self._multiply()
        finally:
            self._gathers = False
            self._between.clear()

    def _multiply(self) -> None:
        """Compute the products that wait."""
        if not self._between:
            return
        shapes = [(prod(each.V.shape[:-1]), each.V.shape[-1]) for each in self._between]
        halves = _blocks_of(self._device, shapes)
        pairs = [*zip(halves, self._between, strict=True)]
        small_products(self._device, [Product(b.left, b.V, half) for half, b in pairs])()
        last = [Product(half, b.right, b.out, b.scale) for half, b in pairs]
        small_products(self._device, last)()
        self._between.clear()

    def orthogonalize(
        self,
        matrices: Sequence[Array],
        polynomial: Polynomial,
        iterations: Sequence[int],
        along: Sequence[Array],
    ) -> list[Array]:
        shapes = tuple(matrix.shape for matrix in matrices)
        key = shapes, polynomial, tuple(iterations)
        if key not in self._iterations:
            self._iterations[key] = _Iterations(self._device, shapes, polynomial, iterations)
        return self._iterations[key](matrices, along)

    def fits(self, matrix: Array) -> bool:
        return bool(matrix.dtype == np.float32 and matrix.size <= _MOST_ENTRIES)


class _Iterations:
    """Newton–Schulz iterations of matrices of given shapes, in memory of their own.

    Tables of launches refer to this memory, and are uploaded once.
    """

    def __init__(
        self,
        device: CupyDevice,
        shapes: Sequence[tuple[int, ...]],
        polynomial: Polynomial,
        iterations: Sequence[int],
    ) -> None:
        self._device, self._shapes = device, shapes
        a, b, c = polynomial
        sides = [(min(shape),) * 2 for shape in shapes]
        grams, polynomials = _blocks_of(device, sides), _blocks_of(device, sides)
        self._first = _blocks_of(device, shapes)
        this, other = self._first, _blocks_of(device, shapes)
        self._memory = grams, polynomials, this, other  # tables have its addresses
        X = [_wide(array) for array in this]
        gram = [Product(x, x.T, G) for x, G in zip(X, grams, strict=True)]
        norms, measure = pair_products(device, [(G, G) for G in grams])
        scaled = [Combination(G, 1.0, G, row=i, exponent=-0.5) for i, G in enumerate(grams)]
        scaled += [Combination(x, 1.0, x, row=i, exponent=-0.25) for i, x in enumerate(this)]
        self._launches: list[Callable[[], None]] = [
            small_products(device, gram), measure, combine(device, scaled, norms),
        ]  # fmt: skip
        self._last = list(this)
        for number in range(max(iterations)):
            chosen = [i for i, count in enumerate(iterations) if count > number]
            X, closer = ([_wide(array) for array in arrays] for arrays in (this, other))
            again = [Product(X[i], X[i].T, grams[i]) for i in chosen]
            inner = [Product(grams[i], grams[i], polynomials[i], c, b, grams[i]) for i in chosen]
            outer = [Product(polynomials[i], X[i], closer[i], 1.0, a, X[i]) for i in chosen]
            steps = (again, inner, outer) if number else (inner, outer)
            self._launches += [small_products(device, step) for step in steps]
            for i in chosen:
                self._last[i] = other[i]
            this, other = other, this

    def __call__(self, matrices: Sequence[Array], along: Sequence[Array]) -> list[Array]:
        """Return the results of matrices, or the matrices that turn from those of ``along``."""
        device = self._device
        norms = multiply_pairs(device, [(matrix, matrix) for matrix in matrices])
        pairs = enumerate(zip(self._first, matrices, strict=True))
        first = [Combination(x, 1.0, m, row=i, exponent=-0.5) for i, (x, m) in pairs]
        combine(device, first, norms)()
        for launch in self._launches:
            launch()
        parts = multiply_pairs(device, [*zip(along, self._last, strict=True)])
        outs = _blocks_of(device, self._shapes)
        choices = [
            Combination(out, 0.0, last, 0.0, matrix, row=i)
            for i, (out, last, matrix) in enumerate(zip(outs, self._last, matrices, strict=True))
        ]
        combine(device, choices, parts, choose=True)()
        return outs


def _blocks_of(device: CupyDevice, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return float32 arrays of some shapes in one block of memory."""
    ends = np.cumsum([prod(shape) for shape in shapes])
    block: Any = device.empty((int(ends[-1]),), np.float32)
    return [
        block[end - prod(shape) : end].reshape(shape)
        for shape, end in zip(shapes, ends.tolist(), strict=True)
    ]


def _wide(matrix: Array) -> Array:
    """Return a view of a matrix with at most as many rows as columns."""
    wide: Array = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return wide
