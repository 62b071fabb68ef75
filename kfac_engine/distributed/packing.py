"""Matrices in flat buffers, of symmetric and triangular matrices the lower triangle only."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from scipy.linalg.lapack import dtpttr, dtrttp, stpttr, strttp

from kfac_engine._types import Array, DType
from kfac_engine.backend.namespace import array_module

# LAPACK packs a triangle about as fast as memory is copied; NumPy's indices take 20 times as long.
_PACK = {np.dtype(np.float32): strttp, np.dtype(np.float64): dtrttp}
_UNPACK = {np.dtype(np.float32): stpttr, np.dtype(np.float64): dtpttr}


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and type of an array, and the part of it that a buffer contains.

    Attributes:
        shape: Shape; ``(…, d, d)`` for triangles.
        dtype: Element type.
        triangle: ``"lower"`` if only the lower triangles are packed, ``"symmetric"`` if the upper
            ones then follow by symmetry; None if all entries are packed.
    """

    shape: tuple[int, ...]
    dtype: DType
    triangle: Literal["symmetric", "lower"] | None = None

    @property
    def size(self) -> int:
        """Number of packed entries."""
        if self.triangle is None:
            return prod(self.shape)
        d = self.shape[-1]
        return prod(self.shape[:-2]) * (d * (d + 1) // 2)


def pack(array: Array, form: Form, buffer: Array) -> None:
    """Write an array to a flat buffer.

    Args:
        array: The array.
        form: Its form.
        buffer: ``(form.size,)``; set.
    """
    if form.triangle is None:
        buffer.reshape(form.shape)[...] = array
        return
    matrices = array.reshape(-1, *array.shape[-2:])
    for matrix, part in zip(matrices, buffer.reshape(len(matrices), -1), strict=True):
        pack_triangle = _PACK.get(matrix.dtype) if array_module(matrix) is np else None
        if pack_triangle is None:
            part[...] = matrix[_lower_indices(matrix)]
        else:  # the upper triangle of the transpose, which has LAPACK's order in memory
            part[...] = pack_triangle(np.ascontiguousarray(matrix).T, uplo="U")[0]


def unpack(buffer: Array, form: Form, *, copy: bool = True) -> Array:
    """Return the array that ``pack`` has written.

    Args:
        buffer: ``(form.size,)``.
        form: Form of the array.
        copy: Whether an array without triangles of the type of the buffer is copied.

    Returns:
        A new array; of triangles, the entries above the diagonals are zero. Symmetric arrays of
        CuPy have both triangles, as second moments of that library do.
    """
    if form.triangle is None:
        return buffer.reshape(form.shape).astype(form.dtype, copy=copy)
    xp = array_module(buffer)
    array: Array = xp.zeros(form.shape, form.dtype)
    matrices = array.reshape(-1, *form.shape[-2:])
    for matrix, part in zip(matrices, buffer.reshape(len(matrices), -1), strict=True):
        unpack_triangle = _UNPACK.get(part.dtype) if xp is np else None
        if unpack_triangle is not None:
            matrix[...] = unpack_triangle(len(matrix), part, uplo="U")[0].T
            continue
        rows, columns = _lower_indices(matrix)
        matrix[rows, columns] = part
        if form.triangle == "symmetric" and xp is not np:
            matrix[columns, rows] = part
    return array


def _lower_indices(matrix: Array) -> tuple[Array, Array]:
    # Both libraries walk a triangle row by row, which is LAPACK's order for the transpose.
    indices: tuple[Array, Array] = array_module(matrix).tril_indices(len(matrix))
    return indices
