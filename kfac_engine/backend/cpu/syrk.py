"""Computes lower triangles of ``out ← beta·out + alpha·Σ x xᵀ`` in threads.

With few rows, each thread computes a block of rows of ``out``: a rectangle left of the diagonal and
a triangle. The blocks have equal area. With many rows, each thread computes the matrix of a part of
the rows, and the matrices are added. The first algorithm needs no scratch memory, and the second
has larger products.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import scale
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import Workers, single_threaded_blas

# Number of multiplications in half a millisecond, and in the time that another thread takes to
# wake.
_WORTH_A_THREAD = 3e7
_WAKING = 5e6
# Number of rows of a part below which adding another matrix costs more than it saves. For 4096 rows
# of 1024, parts take 17.8 ms and row blocks 19.0 ms; for 256 rows, 2.0 ms and 1.3 ms.
_ROWS_OF_A_PART = 512
# Number of columns that are summed in float32 before the sums are added in float64.
_SUM_BLOCK = 4096
# Number of rows that are added at a time, so that few entries above the diagonal are read.
_ADDED_ROWS = 64
# A multiple of all vector lengths and of the cache line, in entries.
_ALIGNED = 16


def threads_for(multiplications: float, workers: Workers) -> int:
    """Return the number of threads for a product; 1 inside a task.

    A triangle takes ``d²·rows / 2`` multiplications.
    """
    worth = int(multiplications / _WORTH_A_THREAD)
    return min(worth, workers.free) if worth > 1 else 1


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int, workers: Workers) -> None:
    """Run tasks in several threads, or one after the other if ``threads`` is 1.

    BLAS uses one thread. The tasks are as for ``Workers.run``.
    """
    if threads > 1:
        workers.run(tasks)
        return
    with single_threaded_blas():
        for task in tasks:
            task()


def count_parts(rows: int, size: int, workers: Workers, spare: int) -> int:
    """Return the number of parts into which the rows are divided, each with a matrix of its own.

    It is 1 if row blocks are faster, or if ``spare`` entries of scratch memory hold no second
    matrix.
    """
    threads = threads_for(rows * size * size / 2, workers)
    affordable = 1 + spare // max(size * size, 1)
    return max(1, min(threads, rows // _ROWS_OF_A_PART, affordable))


def accumulate(
    parts: Sequence[Iterable[Array]],
    out: Array,
    how: Accumulation,
    workers: Workers,
    sums: Sequence[Array | None] = (),
) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·Σ piece pieceᵀ``, in place.

    Each part has matrices ``(d, k)`` that BLAS can read without a copy. A matrix is used before the
    next matrix of its part is requested, and both may share memory. Each part except the first
    needs a matrix of scratch memory. The rows of ``out``, ``(d, d)``, may have gaps. The columns of
    each part are added to its array in ``sums``, ``(d,)``, float64, if there are any.
    """
    first, *others = parts
    beside = sums or [None] * len(parts)
    if not others:
        _add_pieces(first, out, how.alpha, how.beta, workers, beside[0])
        return
    matrices = [_new_matrix(out) for _ in others]
    tasks = [partial(_add_pieces, first, out, how.alpha, how.beta, workers, beside[0])]
    tasks += [
        partial(_add_pieces, pieces, matrix, how.alpha, 0.0, workers, total)
        for pieces, matrix, total in zip(others, matrices, beside[1:], strict=True)
    ]
    workers.run(tasks)
    step = _ADDED_ROWS * len(parts)
    starts = [range(i, len(out), step) for i in range(0, step, _ADDED_ROWS)]
    workers.run([partial(_add_matrices, matrices, out, rows) for rows in starts])


def _add_pieces(
    pieces: Iterable[Array],
    out: Array,
    alpha: float,
    beta: float,
    workers: Workers,
    total: Array | None,
) -> None:
    for piece in pieces:
        columns = [] if total is None else [partial(add_columns, piece, total)]
        work = piece.size * len(piece) / 2
        threads = threads_for(work, workers)
        if threads == 1:
            for task in columns:
                task()
            blas.syrk(piece, out, alpha=alpha, beta=beta)
        else:
            blocks = _row_blocks(len(piece), threads, _WAKING / work)
            tasks = [
                partial(_add_block, piece, out, block_rows, alpha, beta) for block_rows in blocks
            ]
            workers.run([*tasks, *columns])
        beta = 1.0
    scale(out, beta)


def add_columns(piece: Array, total: Array) -> None:
    """Add the columns of a matrix ``(d, k)`` to a sum ``(d,)``, float64."""
    for start in range(0, piece.shape[1], _SUM_BLOCK):
        block = piece[:, start : start + _SUM_BLOCK]
        total += block @ np.ones(block.shape[1], block.dtype)


def _row_blocks(size: int, count: int, ahead: float) -> list[slice]:
    """Return row blocks of a lower triangle with equal area; the first is larger by ``ahead``."""
    each = (1.0 - ahead) / count
    areas = (ahead + each * i for i in range(1, count))
    cuts = {_ALIGNED * round(size * sqrt(area) / _ALIGNED) for area in areas}
    return [slice(a, b) for a, b in pairwise(sorted({0, *cuts, size})) if b <= size]


def _add_block(piece: Array, out: Array, block_rows: slice, alpha: float, beta: float) -> None:
    rows, left = piece[block_rows], slice(0, block_rows.start)
    if block_rows.start:
        blas.gemm(rows, piece[left], out[block_rows, left], alpha=alpha, beta=beta)
    blas.syrk(rows, out[block_rows, block_rows], alpha=alpha, beta=beta)


def _new_matrix(like: Array) -> Array:
    """Return an empty matrix with zeros where ``_add_matrices`` reads above the diagonal."""
    matrix: Array = np.empty(like.shape, like.dtype)
    for start in range(0, len(matrix), _ADDED_ROWS):
        rows = slice(start, start + _ADDED_ROWS)
        matrix[rows, rows] = 0.0
    return matrix


def _add_matrices(matrices: Iterable[Array], out: Array, starts: range) -> None:
    for start in starts:
        stop = min(start + _ADDED_ROWS, len(out))
        for matrix in matrices:
            out[start:stop, :stop] += matrix[start:stop, :stop]
