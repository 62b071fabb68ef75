"""Defines factors that measure and invert only the diagonal blocks of a large matrix.

A matrix of more than ``LARGEST_BLOCK`` rows is divided into the least number of blocks with at most
``LARGEST_PART`` rows. All blocks have equal numbers of rows; the last one is filled up with zeros.

Source: Shi et al. 2023, arXiv:2309.06497, section 3.3 (blocks of the factors of Shampoo).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor, Wanted
from kfac_engine.curvature.factors.refresh import Damping
from kfac_engine.curvature.factors.stacked import StackedSquareFactor
from kfac_engine.curvature.factors.statistics import KroneckerMoment, at_least, scale

# Largest number of rows of a whole matrix: 3 × 3 pixels of 64 channels, and the row of a bias.
LARGEST_BLOCK = 577
# Largest number of rows of a block of a wider one. Half the rows take two thirds of the products,
# and a third of the time of a refresh, and train as well.
LARGEST_PART = 513


def block_shape(side: int) -> tuple[int, int, int]:
    """Return the shape of the average of a matrix of ``side`` rows: ``(blocks, rows, rows)``."""
    blocks = -(-side // LARGEST_PART) if side > LARGEST_BLOCK else 1
    rows = -(-side // blocks)
    return blocks, rows, rows


@dataclass(frozen=True, slots=True)
class DividedMoment(KroneckerMoment):
    """Blocks on the diagonal of the mean of ``x xᵀ``: ``(blocks, rows, rows)``.

    ``side`` is the number of rows of the matrix.
    """

    moment: ClassVar[str] = "blocks"

    side: int = 0

    def shape(self, values: Values) -> tuple[int, ...]:
        return block_shape(self.features(values) + self.homogeneous)

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        scale(out, beta)
        arrays, weights = self._arrays(values, backend), self._row_weights(values)
        if weights is not None:
            self._add_weighted(out, arrays, weights, backend, alpha, 1.0)
            return
        count = sum(self.view.count(x.shape) for x in arrays)
        for x in arrays:
            for rows, _ in self._row_chunks(at_least(out.dtype, x), None, backend):
                self._add_rows(out, rows, None, backend, alpha / count)

    def _add_rows(
        self, out: Array, rows: Array, weights: Any, backend: Backend, alpha: float
    ) -> None:
        xp, (blocks, width, _) = backend.xp, out.shape
        rows = rows.astype(out.dtype, copy=False)
        parts = [rows]
        if self.homogeneous:
            parts.append(xp.ones((rows.shape[0], 1), out.dtype))
        if rest := blocks * width - rows.shape[1] - self.homogeneous:
            parts.append(xp.zeros((rows.shape[0], rest), out.dtype))
        x = xp.concatenate(parts, axis=1) if len(parts) > 1 else rows
        if weights is not None:
            x = x * xp.sqrt(weights).astype(out.dtype)[:, None]
        x = x.reshape(-1, blocks, width).transpose(1, 0, 2)
        out += alpha * backend.matmul(x.swapaxes(1, 2), x)


class DividedFactor(StackedSquareFactor):
    """A factor whose average is block-diagonal: see ``DividedMoment``.

    Operands are matrices, as for a dense factor. A relative damping has a number for each block.
    """

    def __init__(self, statistic: DividedMoment, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
        self._side = statistic.side

    @property
    def side(self) -> int:
        return self._side

    def matrix_side(self, shape: tuple[int, ...]) -> int:
        del shape
        return self._side

    def blocks(self, shape: tuple[int, ...]) -> int:
        return int(shape[0])

    def times(self, power: Array, x: Array) -> Array:
        product = power @ split_rows(x, power.shape, np)
        rows: Array = product.reshape(-1, x.shape[1])[: self._side]
        return rows

    def get_cov(self) -> Array:
        filled: Array = super().get_cov()
        return filled[: self._side, : self._side]

    def eigenvalues(self) -> Array:
        blocks = self.backend.to_numpy(self._matrix()).astype(np.float64)
        rows = blocks.shape[1]
        sizes = (min(rows, self._side - start) for start in range(0, self._side, rows))
        values = [np.linalg.eigvalsh(b[:n, :n]) for b, n in zip(blocks, sizes, strict=True)]
        return np.sort(np.concatenate(values))

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        return self._joined(super().left_multiply_matpower(self._split(x), exp, damping_func))

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        return self.left_multiply_matpower(x.T, exp, damping_func).T

    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        stack = self._split(x)
        return self._joined(
            super().left_multiply_cholesky(
                stack, damping_func, transpose=transpose, inverse=inverse
            )
        )

    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        return self.left_multiply_cholesky(
            x.T, damping_func, transpose=not transpose, inverse=inverse
        ).T

    def _takes_eigenvectors(self, powers: Sequence[Wanted]) -> bool:
        return DenseSquareMatrixFactor._takes_eigenvectors(self, powers)

    def _split(self, x: Array) -> Array:
        """Return the rows of a matrix by block, ``(blocks, rows, n)``."""
        DenseSquareMatrixFactor._check_operand(self, x, axis=-2)
        return split_rows(x, self._lower().shape, self.backend.xp)

    def _joined(self, stack: Array) -> Array:
        return stack.reshape(-1, stack.shape[-1])[: self._side]


def split_rows(x: Array, shape: tuple[int, ...], xp: Any) -> Array:
    """Return the rows of a matrix ``(d, n)`` by block, the last block filled up with zeros.

    ``shape`` is the shape of the average, ``(blocks, rows, rows)``.
    """
    blocks, rows, _ = shape
    if rest := blocks * rows - x.shape[0]:
        x = xp.concatenate([x, xp.zeros((rest, x.shape[1]), x.dtype)], axis=0)
    stack: Array = x.reshape(blocks, rows, x.shape[1])
    return stack
