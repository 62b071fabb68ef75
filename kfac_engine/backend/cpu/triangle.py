"""Converts symmetric matrices to float64 and back, through their lower triangles."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.threads import Workers

# Number of rows that are converted at a time. At a size of 1024, their float64 copy is 1 MB and
# stays in the cache. With fewer rows, threads wait for the interpreter more often.
_ROWS = 128
# Least size for several threads.
_THREADED = 512
_ABOVE = np.triu(np.ones((_ROWS, _ROWS), bool), 1)
# Entries that are added to each row, because rows that begin a multiple of a page apart collide in
# caches.
_PAD = 8


def empty_float64(size: int) -> Array:
    """Return an uninitialised float64 matrix ``(size, size)`` whose rows have a small gap."""
    return np.empty((size, size + _PAD))[:, :size]


def tril_to_float64(matrix: Array, work: Array, workers: Workers) -> float:
    """Convert the lower triangle of a symmetric matrix to float64, and return the squared norm.

    ``work``, ``(d, d)``, receives the triangle; its upper triangle becomes unspecified. The squared
    Frobenius norm is not finite if an entry is not finite or if squares overflow.
    """
    sums: list[float] = []
    _by_row_blocks(len(matrix), workers, partial(_to_float64, matrix, work, sums))
    diagonal = np.einsum("ii->i", work)
    with np.errstate(over="ignore", invalid="ignore"):
        return 2.0 * sum(sums) - float(diagonal @ diagonal)


def symmetric_from_tril(work: Array, dtype: DType, workers: Workers) -> Array:
    """Return the symmetric matrix of type ``dtype`` whose lower triangle is ``work``."""
    whole: Array = np.empty(work.shape, dtype)
    _by_row_blocks(len(work), workers, partial(_from_float64, work, whole))
    return whole


def _to_float64(matrix: Array, work: Array, sums: list[float], span: slice) -> None:
    """Convert a block of rows up to the diagonal, and append its sum of squares to ``sums``."""
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(span.start, span.stop, _ROWS):
            end = min(start + _ROWS, span.stop)
            rows = work[start:end, :end]
            np.copyto(rows, matrix[start:end, :end])
            above = _ABOVE[: end - start, : end - start]
            np.copyto(rows[:, start:], 0.0, where=above)
            sums.append(float(np.einsum("ij,ij->", rows, rows)))


def _from_float64(work: Array, whole: Array, span: slice) -> None:
    """Write a block of rows up to the diagonal, and the columns that mirror it."""
    for start in range(span.start, span.stop, _ROWS):
        end = min(start + _ROWS, span.stop)
        rows = whole[start:end, :end]
        rows[...] = work[start:end, :end]
        block = rows[:, start:]
        np.copyto(block, block.T.copy(), where=_ABOVE[: end - start, : end - start])
        whole[:start, start:end] = rows[:, :start].T


def _by_row_blocks(size: int, workers: Workers, work: Callable[[slice], None]) -> None:
    """Call a function on row blocks of about equal area below the diagonal, in threads."""
    parts = len(workers.row_blocks(size)) if size >= _THREADED else 1
    if parts == 1:
        work(slice(0, size))
        return
    edges = [round(size * (i / parts) ** 0.5) for i in range(parts + 1)]
    workers.run([partial(work, slice(a, b)) for a, b in pairwise(edges) if a < b])
