"""The inverse of a positive definite matrix by halves: nearly all of it products of matrices.

LAPACK's factorisations work in narrow panels and reach half the rate of products, less where the
BLAS solves triangles slowly. Here, with ``A = L Lᵀ`` and ``K = L⁻¹`` cut into halves,

    K₁₁ = L₁₁⁻¹,  L₂₁ = A₂₁ K₁₁ᵀ,  S = A₂₂ − L₂₁ L₂₁ᵀ,  K₂₂ from S,  K₂₁ = −K₂₂ L₂₁ K₁₁,
    A⁻¹ = Kᵀ K,

each half again by halves, down to leaves that LAPACK does. Everything happens in the lower triangle
of the matrix itself: ``d³`` operations as in Cholesky's way, which this is.

Dividing by ``L₁₁`` is multiplying by its inverse, so the error may be ``√condition`` times that of
triangular solves. Measured against extended precision it is LAPACK's within a factor of ten up to a
condition of 1e7, which float32 matrices stay below when damped; at 1e11 the factor came to 700.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu import blas, lapack
from kfac_engine.backend.threads import Workers, single_threaded_blas

# Sides that LAPACK does: 64 to 200 take the same time alone. Beside another thread each call may
# wait for the interpreter: two inverses of side 257 take 3.3 ms with leaves of 64, 2.6 with leaves
# of 128, which are none of 257, and 1.7 with these.
_LEAF = 160
# Sides from which threads share the work. They meet at every product, and a meeting takes 0.1 ms:
# one thread takes 3.7 ms at a side of 512, two take 4.6.
_SHARED = 768
# The least width of what one thread does, and how many for each thread stand beside a half.
_BAND = 128
_PIECES = 3


class Halves(NamedTuple):
    """The lower triangle of a matrix.

    Attributes:
        upper: First half of the diagonal, ``(h, h)``.
        between: ``(d − h, h)``.
        lower: Second half of the diagonal.
    """

    upper: Array
    between: Array
    lower: Array


def invert(work: Array, workers: Workers) -> None:
    """``A⁻¹`` in place of ``A``, in the lower triangle alone.

    Args:
        work: ``(d, d)``, symmetric and positive definite, float64, with adjacent elements in each
            row; its lower triangle is read.
        workers: Share the work.

    Raises:
        LinAlgError: NumPy's; the matrix is not positive definite.
    """
    with single_threaded_blas():
        _factor(work, workers)
        _square(work, workers)


def _factor(A: Array, workers: Workers) -> None:
    """``L⁻¹`` in place of ``A``."""
    if len(A) <= _LEAF:
        _leaf(A)
        return
    parts = _parts(A, workers)
    P, B, S = _halves(A)
    _factor(P, workers)
    _run(workers, _from_right(P, B, parts, transposed=True, alpha=1.0))
    _run(workers, _symmetric(B, S, parts, alpha=-1.0))
    if _parts(S, workers) == 1 < parts:
        products = _from_right(P, B, _PIECES * workers.count, transposed=False, alpha=-1.0)
        workers.run([partial(_factor, S, workers), *products])
    else:
        _run(workers, _from_right(P, B, parts, transposed=False, alpha=-1.0))
        _factor(S, workers)
    _run(workers, [partial(_from_left, S, B[:, s], False) for s in _bands(B.shape[1], parts)])


def _square(K: Array, workers: Workers) -> None:
    """``Kᵀ K`` in place of the lower-triangular ``K``."""
    if len(K) <= _LEAF:
        lapack.lauum(K)
        return
    P, B, S = _halves(K)
    if _parts(K, workers) == 1:
        _square(P, workers)
        blas.syrk(B.T, P, alpha=1.0, beta=1.0)
        _from_left(S, B, True)
        _square(S, workers)
        return
    pieces, before = _PIECES * workers.count, np.empty(B.shape)
    products = [partial(_kept, S, B[:, s], before[:, s]) for s in _bands(B.shape[1], pieces)]
    workers.run([partial(_square, P, workers), *products])
    workers.run([partial(_square, S, workers), *_symmetric(before.T, P, pieces, alpha=1.0)])


def _leaf(A: Array) -> None:
    order = lapack.potrf(A)
    if order:
        raise np.linalg.LinAlgError(f"the leading minor of order {order} is not positive.")
    lapack.trtri(A)


def _kept(S: Array, B: Array, before: Array) -> None:
    """``Sᵀ B`` in place of ``B``, which is kept in ``before``."""
    before[...] = B
    _from_left(S, B, True)


def _from_left(lower: Array, out: Array, transposed: bool) -> None:
    """``out ← lower·out``, or ``lowerᵀ·out``."""
    blas.trmm(lower, out, right=False, transposed=transposed, alpha=1.0)


def _from_right(
    lower: Array, out: Array, parts: int, *, transposed: bool, alpha: float
) -> list[Callable[[], None]]:
    """Tasks that do ``out ← alpha·out·lower``, or ``alpha·out·lowerᵀ``."""
    times = partial(blas.trmm, right=True, transposed=transposed, alpha=alpha)
    return [partial(times, lower, out[rows]) for rows in _bands(len(out), parts)]


def _symmetric(x: Array, out: Array, parts: int, *, alpha: float) -> list[Callable[[], None]]:
    """Tasks that do the lower triangle of ``out ← out + alpha·x xᵀ``, all of about equal work."""
    side = len(out)
    parts = max(1, min(parts, side // _BAND))
    edges = [round(side * (i / parts) ** 0.5) for i in range(parts + 1)]
    return [partial(_trapezoid, x, out, slice(a, b), alpha) for a, b in pairwise(edges) if a < b]


def _trapezoid(x: Array, out: Array, rows: slice, alpha: float) -> None:
    """Some rows of a symmetric product, up to the diagonal."""
    before = slice(0, rows.start)
    if rows.start:
        blas.gemm(x[rows], x[before], out[rows, before], alpha=alpha, beta=1.0)
    blas.syrk(x[rows], out[rows, rows], alpha=alpha, beta=1.0)


def _halves(matrix: Array) -> Halves:
    half = (len(matrix) + 15) // 16 * 8  # rows that begin on a cache line, where the side allows
    return Halves(matrix[:half, :half], matrix[half:, :half], matrix[half:, half:])


def _parts(matrix: Array, workers: Workers) -> int:
    """Threads for a matrix: one if it is small, or inside a task."""
    return len(workers.bands(len(matrix))) if len(matrix) >= _SHARED else 1


def _bands(length: int, parts: int) -> list[slice]:
    parts = max(1, min(parts, length // _BAND))
    edges = [length * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _run(workers: Workers, tasks: list[Callable[[], None]]) -> None:
    """Tasks side by side; one alone without a meeting of threads."""
    if len(tasks) == 1:
        tasks[0]()
    else:
        workers.run(tasks)
