"""Inverts a positive definite matrix recursively, mostly by matrix products.

LAPACK's factorisations work in narrow panels and reach half the rate of products. Here, with
``A = L Lᵀ`` and ``K = L⁻¹`` in 2 × 2 blocks,

    K₁₁ = L₁₁⁻¹,  L₂₁ = A₂₁ K₁₁ᵀ,  S = A₂₂ − L₂₁ L₂₁ᵀ,  K₂₂ from S,  K₂₁ = −K₂₂ L₂₁ K₁₁,
    A⁻¹ = Kᵀ K.

The same formulas invert the diagonal blocks, down to leaves that LAPACK computes. All
steps run in place in the lower triangle, with the ``d³`` operations of Cholesky's method.

``L₂₁`` is a product with ``K₁₁`` instead of a triangular solve, so the rounding error can grow by
up to ``√condition``. Compared with extended precision, it is at most ten times the error of LAPACK
up to a condition of 1e7, which damped float32 factors do not exceed. At 1e11 the ratio is 700.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas
from kfac_engine.backend.threads import Workers, equal_slices, single_threaded_blas

# Largest size of a leaf. Sizes from 64 to 200 are equally fast on one thread. Larger leaves need
# fewer calls, which hold the interpreter lock.
_LEAF = 160
# Least size for several threads. They wait 0.1 ms for each other at every product. At 512, one
# thread takes 3.7 ms and two threads take 4.6 ms.
_THREADED = 768
# Least number of rows of a task, and number of tasks for each thread while another thread computes
# a block.
_LEAST_ROWS = 128
_PIECES = 3


class Blocks(NamedTuple):
    """The blocks on and below the diagonal of a 2 × 2 partition.

    They are ``(h, h)``, ``(d − h, h)`` and ``(d − h, d − h)``.
    """

    first: Array
    below: Array
    second: Array


def invert(work: Array, workers: Workers) -> None:
    """Replace the lower triangle of a positive definite matrix with that triangle of the inverse.

    The matrix is float64 with adjacent elements in each row. NumPy's ``LinAlgError`` is raised if
    it is not positive definite.
    """
    with single_threaded_blas():
        if len(work) <= _LEAF:
            invert_leaf(work)
            return
        _factor(work, workers)
        _square(work, workers)


def invert_leaf(work: Array, *routines: str) -> None:
    """Call routines of LAPACK, by default those of ``A⁻¹``; errors are as for ``invert``."""
    order = blas.lapack(work, *(routines or ("potrf", "trtri", "lauum")))
    if order:
        raise np.linalg.LinAlgError(f"the leading minor of order {order} is not positive.")


def _factor(A: Array, workers: Workers) -> None:
    """Replace ``A = L Lᵀ`` with ``L⁻¹``, in the lower triangle."""
    if len(A) <= _LEAF:
        invert_leaf(A, "potrf", "trtri")
        return
    count = _thread_count(A, workers)
    P, B, S = _blocks(A)
    _factor(P, workers)
    _run(workers, _from_right(P, B, count, transposed=True, alpha=1.0))
    _run(workers, _symmetric(B, S, count, alpha=-1.0))
    if _thread_count(S, workers) == 1 < count:
        products = _from_right(P, B, _PIECES * workers.count, transposed=False, alpha=-1.0)
        workers.run([partial(_factor, S, workers), *products])
    else:
        _run(workers, _from_right(P, B, count, transposed=False, alpha=-1.0))
        _factor(S, workers)
    columns = equal_slices(B.shape[1], count, _LEAST_ROWS)
    _run(workers, [partial(_from_left, S, B[:, s], False) for s in columns])


def _square(K: Array, workers: Workers) -> None:
    """Replace the lower-triangular ``K`` with ``Kᵀ K``."""
    if len(K) <= _LEAF:
        blas.lapack(K, "lauum")
        return
    P, B, S = _blocks(K)
    if _thread_count(K, workers) == 1:
        _square(P, workers)
        blas.syrk(B.T, P, alpha=1.0, beta=1.0)
        _from_left(S, B, True)
        _square(S, workers)
        return
    pieces, copy = _PIECES * workers.count, np.empty(B.shape)
    products = [
        partial(_from_left_copied, S, B[:, s], copy[:, s])
        for s in equal_slices(B.shape[1], pieces, _LEAST_ROWS)
    ]
    workers.run([partial(_square, P, workers), *products])
    workers.run([partial(_square, S, workers), *_symmetric(copy.T, P, pieces, alpha=1.0)])


def _from_left_copied(S: Array, B: Array, copy: Array) -> None:
    """Replace ``B`` with ``Sᵀ B``; ``copy`` receives the old ``B``."""
    copy[...] = B
    _from_left(S, B, True)


def _from_left(lower: Array, out: Array, transposed: bool) -> None:
    """Compute ``out ← lower·out`` or ``out ← lowerᵀ·out``, in place."""
    blas.trmm(lower, out, right=False, transposed=transposed, alpha=1.0)


def _from_right(
    lower: Array, out: Array, count: int, *, transposed: bool, alpha: float
) -> list[Callable[[], None]]:
    """Return tasks for ``out ← alpha·out·lower`` or ``out ← alpha·out·lowerᵀ``."""
    times = partial(blas.trmm, right=True, transposed=transposed, alpha=alpha)
    return [partial(times, lower, out[rows]) for rows in equal_slices(len(out), count, _LEAST_ROWS)]


def _symmetric(x: Array, out: Array, count: int, *, alpha: float) -> list[Callable[[], None]]:
    """Return tasks of equal work for the lower triangle of ``out ← out + alpha·x xᵀ``."""
    size = len(out)
    count = max(1, min(count, size // _LEAST_ROWS))
    edges = [round(size * (i / count) ** 0.5) for i in range(count + 1)]
    return [partial(_trapezoid, x, out, slice(a, b), alpha) for a, b in pairwise(edges) if a < b]


def _trapezoid(x: Array, out: Array, rows: slice, alpha: float) -> None:
    """Compute the entries of a symmetric product in some rows, up to the diagonal."""
    copy = slice(0, rows.start)
    if rows.start:
        blas.gemm(x[rows], x[copy], out[rows, copy], alpha=alpha, beta=1.0)
    blas.syrk(x[rows], out[rows, rows], alpha=alpha, beta=1.0)


def _blocks(matrix: Array) -> Blocks:
    half = (len(matrix) + 15) // 16 * 8  # a multiple of 8 rows, so that they begin on a cache line
    return Blocks(matrix[:half, :half], matrix[half:, :half], matrix[half:, half:])


def _thread_count(matrix: Array, workers: Workers) -> int:
    """Return the number of threads for a matrix: 1 for a small matrix or inside a task."""
    return workers.free if len(matrix) >= _THREADED else 1


def _run(workers: Workers, tasks: list[Callable[[], None]]) -> None:
    """Run tasks in threads, or a single task in the calling thread."""
    if len(tasks) == 1:
        tasks[0]()
    else:
        workers.run(tasks)
