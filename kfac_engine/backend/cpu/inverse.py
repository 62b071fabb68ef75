"""Inverts, factors or diagonalizes one symmetric matrix in float64.

The entries of a float32 factor are rounded, so small eigenvalues may be negative. Float64
arithmetic adds no significant error. A float32 Cholesky inverse would have the relative error
``7e-9 · condition``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
from scipy import linalg

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu import blas, recursive_inverse
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.errors import BackendError, InputError, NonFiniteError, ShapeError

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
    diagonal = work.diagonal()
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
        if start:
            whole[:start, start:end] = rows[:, :start].T


def _by_row_blocks(size: int, workers: Workers, work: Callable[[slice], None]) -> None:
    """Call a function on row blocks of about equal area below the diagonal, in threads."""
    parts = workers.free if size >= _THREADED else 1
    if parts == 1:
        work(slice(0, size))
        return
    edges = [round(size * (i / parts) ** 0.5) for i in range(parts + 1)]
    workers.run([partial(work, slice(a, b)) for a, b in pairwise(edges) if a < b])


_LOG = logging.getLogger(__name__)

# Factors of the damping in successive attempts, before eigenvalues are clamped.
_ATTEMPTS = (1, 10, 100, 1000)

# Least size at which one matrix uses the threads of BLAS in LAPACK. On two cores, eigenvectors take
# 0.85 of the time of one core at 1024, and 0.95 at 512.
_LARGE = 1024

# Norm below which squares of float64 numbers may lose digits.
_SMALLEST_NORM = 1e-140


def damping_floor(matrix: Array, dtype: DType) -> float:
    """Return the least useful damping: the rounding error of the eigenvalues.

    The floor is ``ε·‖matrix‖_F`` with the machine epsilon of ``dtype``, the element type of the
    factor. The matrix is float64. By Weyl's inequality, rounding can change an eigenvalue by this
    amount. The floor is positive and large enough that no inverse overflows.
    """
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(matrix))
    if not _SMALLEST_NORM < norm < np.inf:
        # Squares overflowed or underflowed, so scale by the largest entry first.
        largest = max(float(np.abs(matrix).max()), float(np.finfo(dtype).tiny))
        norm = largest * float(np.linalg.norm(matrix / largest))
    return _floor(norm, dtype)


def least_dampings(lower: Array, dampings: Array, dtype: DType) -> Array | None:
    """Return the dampings of a stack of matrices, raised to the floor where they are smaller.

    ``lower`` is ``(n, d, d)``, float64, lower triangles with zeros above. Floors are for factors of
    the type ``dtype``. The result is None if a damping is not allowed, or if a norm is not finite,
    zero or tiny.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = 2.0 * np.einsum("nij,nij->n", lower, lower) - np.einsum(
            "nii,nii->n", lower, lower
        )
    fit = (
        (dampings >= 0.0) & (dampings < np.inf) & (squares > _SMALLEST_NORM**2) & (squares < np.inf)
    )
    if not fit.all():
        return None
    floors = np.finfo(dtype).eps * np.sqrt(squares)
    least: Array = np.maximum(dampings, np.maximum(floors, np.finfo(dtype).tiny))
    return least


def damped_inverse(matrix: Array, damping: float, workers: Workers) -> Array:
    """Return ``(matrix + damping·I)⁻¹``, symmetric, in the element type of ``matrix``.

    The lower triangle of the matrix is read. A damping below ``damping_floor`` is raised to it. If
    the Cholesky factorisation fails with 1, 10, 100 and 1000 times the damping, the matrix is
    indefinite by more than rounding. Then negative eigenvalues are replaced with zero.
    """
    check_shape(matrix)
    work = empty_float64(len(matrix))
    least = _load(matrix, damping, work, workers)
    for damped in _damped(matrix, least, work, workers):
        try:
            if matrix.dtype == np.float64:
                _invert_by_solving(damped, workers)
            else:
                recursive_inverse.invert(damped, workers)
        except np.linalg.LinAlgError:
            continue
        return symmetric_from_tril(damped, matrix.dtype, workers)
    values, vectors = _clamped(matrix, least, workers)
    return symmetric_from_tril((vectors / values) @ vectors.T, matrix.dtype, workers)


def damped_cholesky(matrix: Array, damping: float, workers: Workers) -> Array:
    """Return lower-triangular ``L`` with ``L Lᵀ = matrix + damping·I``, in its element type.

    The function reads the lower triangle of ``matrix``, and returns a positive diagonal. It retries
    and raises errors as ``damped_inverse`` does. BLAS uses its own threads for a large matrix.
    """
    check_shape(matrix)
    work = empty_float64(len(matrix))
    least = _load(matrix, damping, work, workers)
    with _blas_for(matrix, workers):
        for damped in _damped(matrix, least, work, workers):
            if blas.lapack(damped, "potrf") == 0:
                return np.tril(damped).astype(matrix.dtype)
    values, vectors = _clamped(matrix, least, workers)
    # With M = QΛQᵀ and √Λ Qᵀ = Q'R, Rᵀ is a triangular root of M, which always exists.
    R: Array = np.linalg.qr(np.sqrt(values)[:, None] * vectors.T).R
    lower: Array = (R * np.where(np.diagonal(R) < 0, -1.0, 1.0)[:, None]).T
    return lower.astype(matrix.dtype, order="C")


def triangular_inverse(lower: Array, workers: Workers) -> Array:
    """Return ``L⁻¹`` of a lower-triangular matrix, lower-triangular, in its element type.

    The upper triangle of ``lower`` is not read. A zero on the diagonal raises ``InputError``.
    """
    check_square(lower)
    work = np.tril(lower).astype(np.float64)
    with _blas_for(lower, workers):
        index = blas.lapack(work, "trtri") - 1
    if index >= 0:
        raise InputError(f"a triangular matrix with zero at [{index}, {index}] has no inverse.")
    return work.astype(lower.dtype)


def eigh(matrix: Array, workers: Workers) -> tuple[Array, Array]:
    """Return ascending eigenvalues ``(d,)`` and orthonormal eigenvectors of a symmetric matrix.

    The eigenvectors are the columns of a matrix ``(d, d)``. Both are float64. The lower triangle of
    the matrix is read. If LAPACK's iteration does not converge, ``BackendError`` is raised.
    """
    check_square(matrix)
    if len(matrix) == 1:  # SciPy 1.13 allocates too little workspace
        return matrix[0].astype(np.float64), np.ones((1, 1))
    try:
        with _blas_for(matrix, workers):
            values, vectors = linalg.eigh(
                matrix.astype(np.float64), driver="evd", overwrite_a=True, check_finite=False
            )
    except np.linalg.LinAlgError as error:
        raise BackendError(
            f"the eigenvalues of a {matrix.shape} matrix did not converge ({error}); an inverse "
            f"(exponent -1) needs no eigenvalues."
        ) from error
    return values, vectors


def eigh_stack(stack: Array) -> tuple[Array, Array]:
    """Return eigenvalues ``(g, d)`` and eigenvectors ``(g, d, d)`` of a stack of matrices, float64.

    If LAPACK's iteration does not converge, ``BackendError`` is raised.
    """
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not stack.size:
        raise ShapeError(f"a stack of factors must have shape (n, d, d), got {stack.shape}.")
    if not np.isfinite(stack).all():
        check_square(next(matrix for matrix in stack if not np.isfinite(matrix).all()))
    try:
        values, vectors = np.linalg.eigh(stack.astype(np.float64))
    except np.linalg.LinAlgError as error:
        raise BackendError(
            f"the eigenvalues of a stack of shape {stack.shape} did not converge ({error})."
        ) from error
    return values, vectors


def check_square(matrix: Array) -> None:
    """Raise ``ShapeError`` if a matrix is not square, ``NonFiniteError`` if it is not finite."""
    check_shape(matrix)
    if not np.isfinite(matrix).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(matrix))[0])
        raise NonFiniteError(
            f"a {matrix.shape} factor contains {matrix[bad]} at {list(bad)}; look for overflow in "
            f"the statistics it was averaged from."
        )


def check_shape(matrix: Array) -> None:
    """Raise ``ShapeError`` unless a matrix is square and not empty."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ShapeError(f"a factor must be a square matrix, got shape {matrix.shape}.")


def _load(matrix: Array, damping: float, work: Array, workers: Workers) -> float:
    """Copy a checked matrix to ``work``; return the damping of the first attempt."""
    squares = tril_to_float64(matrix, work, workers)
    if not 0.0 <= damping < np.inf:
        raise InputError(f"the damping must be zero or positive and finite, got {damping}.")
    if _SMALLEST_NORM**2 < squares < np.inf:
        return max(damping, _floor(squares**0.5, matrix.dtype))
    check_square(np.tril(matrix))
    matrix = _completed(matrix)
    if damping == 0.0 and not matrix.any():
        raise InputError(f"a zero matrix {matrix.shape} needs a positive damping to be inverted.")
    return max(damping, damping_floor(matrix.astype(np.float64), matrix.dtype))


def _damped(matrix: Array, least: float, work: Array, workers: Workers) -> Iterator[Array]:
    """Yield the matrix in ``work`` with increasing dampings on its diagonal."""
    for factor in _ATTEMPTS:
        if factor > 1:
            _LOG.warning(
                "a %s matrix is not positive definite with damping %.3g; trying %.3g",
                matrix.shape,
                least * factor / 10,
                least * factor,
            )
            tril_to_float64(matrix, work, workers)
        diagonal = work.diagonal()
        diagonal.setflags(write=True)
        diagonal += least * factor
        yield work


def _invert_by_solving(work: Array, workers: Workers) -> None:
    """Replace ``A`` in ``work`` with ``A⁻¹``, at the full accuracy of float64.

    NumPy's ``LinAlgError`` is raised if the matrix is not positive definite.
    """
    with _blas_for(work, workers):
        recursive_inverse.invert_leaf(work)


def _blas_for(matrix: Array, workers: Workers) -> AbstractContextManager[None]:
    """Return a context in which BLAS uses several threads for a large matrix, else one."""
    return nullcontext() if workers.count > 1 and len(matrix) >= _LARGE else single_threaded_blas()


def _clamped(matrix: Array, least: float, workers: Workers) -> tuple[Array, Array]:
    """Return damped eigenvalues and eigenvectors; negative eigenvalues are set to zero first."""
    _LOG.warning(
        "a %s matrix is indefinite; its negative eigenvalues are replaced with zero", matrix.shape
    )
    values, vectors = eigh(_completed(matrix), workers)
    return np.maximum(values, 0.0) + least, vectors


def _completed(matrix: Array) -> Array:
    """Return the symmetric matrix with the lower triangle of ``matrix``."""
    lower: Array = np.tril(matrix)
    return lower + np.tril(lower, -1).T


def _floor(norm: float, dtype: DType) -> float:
    limits = np.finfo(dtype)
    return max(float(limits.eps) * norm, float(limits.tiny))
