"""Symmetric matrices in and out of float64, by their lower triangles, in one pass each way."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.threads import Workers

# Rows at a time: at a side of 1024 their float64 copy is 1 MB, so that what is done to them next
# finds them in the cache. Fewer are no slower alone, but threads side by side wait for the
# interpreter at every call: two that load a matrix of side 257 take 0.36 ms by 64 rows, 0.26 so.
_ROWS = 128
# Sides from which a thread saves more than it costs.
_SHARED = 512
_ABOVE = np.triu(np.ones((_ROWS, _ROWS), bool), 1)
# Elements between rows that begin a multiple of a page apart collide in caches.
_PAD = 8


def room(side: int) -> Array:
    """An uninitialised float64 matrix ``(side, side)`` for ``load``, rows a little apart."""
    return np.empty((side, side + _PAD))[:, :side]


def load(matrix: Array, work: Array, workers: Workers) -> float:
    """Copy the lower triangle.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        work: ``(d, d)``, float64; what it holds above the diagonal is anything afterwards.
        workers: Share the work.

    Returns:
        The square of the Frobenius norm of the whole matrix; not finite if an entry is not, or if
        squares overflow.
    """
    sums: list[float] = []
    _banded(len(matrix), workers, partial(_load, matrix, work, sums))
    diagonal = np.einsum("ii->i", work)
    with np.errstate(over="ignore", invalid="ignore"):
        return 2.0 * sum(sums) - float(diagonal @ diagonal)


def store(work: Array, dtype: DType, workers: Workers) -> Array:
    """The symmetric matrix of a lower triangle.

    Args:
        work: ``(d, d)``, float64; its lower triangle is read.
        dtype: Of the result.
        workers: Share the work.

    Returns:
        A new C-contiguous matrix ``(d, d)``.
    """
    whole: Array = np.empty(work.shape, dtype)
    _banded(len(work), workers, partial(_store, work, whole))
    return whole


def _load(matrix: Array, work: Array, sums: list[float], band: slice) -> None:
    """Some rows, and the sum of their squares."""
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(band.start, band.stop, _ROWS):
            end = min(start + _ROWS, band.stop)
            rows = work[start:end, :end]
            np.copyto(rows, matrix[start:end, :end])
            above = _ABOVE[: end - start, : end - start]
            np.copyto(rows[:, start:], 0.0, where=above)
            sums.append(float(np.einsum("ij,ij->", rows, rows)))


def _store(work: Array, whole: Array, band: slice) -> None:
    """Some rows up to the diagonal, and the columns that mirror them."""
    for start in range(band.start, band.stop, _ROWS):
        end = min(start + _ROWS, band.stop)
        rows = whole[start:end, :end]
        rows[...] = work[start:end, :end]
        block = rows[:, start:]
        np.copyto(block, block.T.copy(), where=_ABOVE[: end - start, : end - start])
        whole[:start, start:end] = rows[:, :start].T


def _banded(side: int, workers: Workers, work: Callable[[slice], None]) -> None:
    """Does bands of rows, of about equal area below the diagonal, side by side."""
    parts = len(workers.bands(side)) if side >= _SHARED else 1
    if parts == 1:
        work(slice(0, side))
        return
    edges = [round(side * (i / parts) ** 0.5) for i in range(parts + 1)]
    workers.run([partial(work, slice(a, b)) for a, b in pairwise(edges) if a < b])
