"""Second moments of rows, on one triangle by SYRK, then mirrored."""

import numpy as np

from kfac_engine._types import Array

_MIRROR_BLOCK = 256


def mirror(matrix: Array) -> None:
    """Copy the lower triangle onto the upper one, in blocks that fit a cache.

    Args:
        matrix: ``(d, d)``, changed in place.
    """
    side = len(matrix)
    for i in range(0, side, _MIRROR_BLOCK):
        rows = slice(i, i + _MIRROR_BLOCK)
        for j in range(0, i, _MIRROR_BLOCK):
            columns = slice(j, j + _MIRROR_BLOCK)
            matrix[columns, rows] = matrix[rows, columns].T
        block = matrix[rows, rows]
        upper = np.triu_indices(len(block), 1)
        block[upper] = block.T[upper]


def second_moment(x: Array, out: Array, homogeneous: bool, alpha: float, beta: float) -> None:
    """First plain form: ``x`` is ``(rows, d)``."""
    rows = x.astype(out.dtype, copy=False)
    d = rows.shape[1]
    fresh = np.empty_like(out)
    np.matmul(rows.T, rows, out=fresh[:d, :d])
    if homogeneous:
        fresh[d, :d] = fresh[:d, d] = rows.sum(axis=0)
        fresh[d, d] = len(rows)
    fresh *= alpha
    if beta == 0.0:
        out[...] = fresh
    else:
        out *= beta
        out += fresh
    mirror(out)
