"""Inverses and factors of damped symmetric matrices, in float64, by LAPACK and by products.

A factor kept in float32 is known only to within its rounding: small eigenvalues may come out
negative. Working in float64 adds no second error (a float32 Cholesky inverse is wrong by about
``7e-9 · condition``).
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from scipy import linalg

from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu import lapack, recursive_inverse, triangle
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.errors import BackendError, InputError, NonFiniteError, ShapeError

_LOG = logging.getLogger(__name__)

# Dampings tried before the eigenvalues are clamped: each ten times the one before.
_LADDER = (1, 10, 100, 1000)

# Sides from which one matrix alone gets BLAS's own threads, where a routine of LAPACK is all of the
# work: eigenvectors took 0.85 of the time on two cores at 1024 and 0.66 at 2048, 0.95 at 512.
_LARGE = 1024

# Below this, squares of float64 numbers may lose digits.
_SMALLEST_NORM = 1e-140


def damping_floor(matrix: Array, dtype: DType) -> float:
    """The least damping worth using: what rounding alone may have moved the eigenvalues by.

    ``ε·‖matrix‖_F``, with the machine epsilon of the dtype the matrix is kept in: by Weyl's
    inequality no eigenvalue is known better. Never so small that an inverse could overflow.

    Args:
        matrix: ``(d, d)``, float64.
        dtype: That it is kept in, float32 or float64.

    Returns:
        A positive number, in the units of the matrix.
    """
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(matrix))
    if not _SMALLEST_NORM < norm < np.inf:
        # Squares overflowed or vanished, so the norm is taken relative to the largest entry.
        largest = max(float(np.abs(matrix).max()), float(np.finfo(dtype).tiny))
        norm = largest * float(np.linalg.norm(matrix / largest))
    return _floor(norm, dtype)


def least_dampings(lower: Array, dampings: Array, dtype: DType) -> Array | None:
    """For each matrix of a stack the larger of its damping and the floor.

    Args:
        lower: ``(n, d, d)``, float64, lower triangles with zeros above.
        dampings: ``(n,)``.
        dtype: That the matrices are kept in.

    Returns:
        ``(n,)``; None if a damping or a matrix is impossible, or its norm needs care.
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
    """``(matrix + damping·I)⁻¹``, symmetric, in the dtype of ``matrix``.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        damping: Added to the diagonal; at least ``damping_floor`` is.
        workers: Share the work where the matrix is large.

    Returns:
        A new matrix ``(d, d)``. Where Cholesky's factorisation fails at ten, a hundred and a
        thousand times the damping too, the matrix is indefinite by more than rounding: then
        negative eigenvalues count as zero.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: The damping is negative or not finite, or there is nothing to invert.
    """
    check_shape(matrix)
    work = triangle.room(len(matrix))
    least = _loaded(matrix, damping, work, workers)
    for damped in _damped(matrix, least, work, workers):
        try:
            if matrix.dtype == np.float64:
                _invert_by_solving(damped, workers)
            else:
                recursive_inverse.invert(damped, workers)
        except np.linalg.LinAlgError:
            continue
        return triangle.store(damped, matrix.dtype, workers)
    values, vectors = _clamped(matrix, least, workers)
    return triangle.store((vectors / values) @ vectors.T, matrix.dtype, workers)


def damped_cholesky(matrix: Array, damping: float, workers: Workers) -> Array:
    """Lower-triangular ``L`` with ``L Lᵀ = matrix + damping·I``, in the dtype of ``matrix``.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        damping: As for ``damped_inverse``, with the same retries.
        workers: As many threads as BLAS may use for a large matrix.

    Returns:
        A new matrix ``(d, d)`` with a positive diagonal, zero above it.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: The damping is negative or not finite, or there is nothing to factor.
    """
    check_shape(matrix)
    work = triangle.room(len(matrix))
    least = _loaded(matrix, damping, work, workers)
    with _blas_for(matrix, workers):
        for damped in _damped(matrix, least, work, workers):
            if lapack.potrf(damped) == 0:
                return np.tril(damped).astype(matrix.dtype)
    values, vectors = _clamped(matrix, least, workers)
    # With M = QΛQᵀ and √Λ Qᵀ = Q'R: M = Rᵀ R, a triangular root that cannot fail.
    R: Array = np.linalg.qr(np.sqrt(values)[:, None] * vectors.T).R
    lower: Array = (R * np.where(np.diagonal(R) < 0, -1.0, 1.0)[:, None]).T
    return lower.astype(matrix.dtype, order="C")


def triangular_inverse(lower: Array, workers: Workers) -> Array:
    """``L⁻¹`` of a lower-triangular matrix, lower-triangular, in its dtype.

    Args:
        lower: ``(d, d)``; what stands above the diagonal is not read.
        workers: As for ``damped_cholesky``.

    Returns:
        A new matrix ``(d, d)``, zero above the diagonal.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: An entry of the diagonal is zero.
    """
    check_square(lower)
    work = np.tril(lower).astype(np.float64)
    with _blas_for(lower, workers):
        place = lapack.trtri(work) - 1
    if place >= 0:
        raise InputError(f"a triangular matrix with zero at [{place}, {place}] has no inverse.")
    return work.astype(lower.dtype)


def eigh(matrix: Array, workers: Workers) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and orthonormal eigenvectors of a symmetric matrix.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        workers: As for ``damped_cholesky``.

    Returns:
        Values ``(d,)`` and vectors ``(d, d)`` as columns, float64.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        BackendError: LAPACK's iteration did not converge.
    """
    check_square(matrix)
    if len(matrix) == 1:  # SciPy 1.13 refuses the work space that LAPACK asks for
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
    """The ``eigh`` of each matrix of a stack.

    Args:
        stack: ``(g, d, d)``.

    Returns:
        Values ``(g, d)`` and vectors ``(g, d, d)``, float64.

    Raises:
        ShapeError: The matrices are not square.
        NonFiniteError: One holds NaN or infinity.
        BackendError: LAPACK's iteration did not converge.
    """
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not stack.size:
        raise ShapeError(f"a stack of square matrices is needed, got shape {stack.shape}.")
    if not np.isfinite(stack).all():
        check_square(next(matrix for matrix in stack if not np.isfinite(matrix).all()))
    try:
        values, vectors = np.linalg.eigh(stack.astype(np.float64))
    except np.linalg.LinAlgError as error:
        raise BackendError(
            f"the eigenvalues of a stack {stack.shape} did not converge ({error})."
        ) from error
    return values, vectors


def check_square(matrix: Array) -> None:
    """Refuse what LAPACK must not see.

    Args:
        matrix: To be a finite square matrix.

    Raises:
        ShapeError: It is not square.
        NonFiniteError: It holds NaN or infinity.
    """
    check_shape(matrix)
    if not np.isfinite(matrix).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(matrix))[0])
        raise NonFiniteError(
            f"a {matrix.shape} factor holds {matrix[bad]} at {list(bad)}; look for overflow in the "
            f"statistics it was averaged from."
        )


def check_shape(matrix: Array) -> None:
    """Refuse what is no square matrix.

    Args:
        matrix: To be one.

    Raises:
        ShapeError: It is not.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ShapeError(f"a square matrix is needed, got one of shape {matrix.shape}.")


def _loaded(matrix: Array, damping: float, work: Array, workers: Workers) -> float:
    """The damping to start with, once the matrix is copied to ``work`` and fit for LAPACK."""
    squares = triangle.load(matrix, work, workers)
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
    """The loaded matrix with more and more on its diagonal, as long as it is asked for."""
    for factor in _LADDER:
        if factor > 1:
            _LOG.warning(
                "a %s matrix is not positive definite with damping %.3g; trying %.3g",
                matrix.shape,
                least * factor / 10,
                least * factor,
            )
            triangle.load(matrix, work, workers)
        diagonal = np.einsum("ii->i", work)
        diagonal += least * factor
        yield work


def _invert_by_solving(work: Array, workers: Workers) -> None:
    """``A⁻¹`` in place of ``A``, to the last digit that float64 matrices are known to.

    Raises:
        LinAlgError: NumPy's; the matrix is not positive definite.
    """
    with _blas_for(work, workers):
        order = lapack.potrf(work)
        if order:
            raise np.linalg.LinAlgError(f"the leading minor of order {order} is not positive.")
        lapack.trtri(work)
        lapack.lauum(work)


def _blas_for(matrix: Array, workers: Workers) -> AbstractContextManager[None]:
    """BLAS's own threads for one large matrix, where there may be several; else one thread."""
    return nullcontext() if workers.count > 1 and len(matrix) >= _LARGE else single_threaded_blas()


def _clamped(matrix: Array, least: float, workers: Workers) -> tuple[Array, Array]:
    """Damped eigenvalues with the negative ones taken as zero, and their vectors."""
    _LOG.warning("a %s matrix is indefinite; its negative eigenvalues are cut off", matrix.shape)
    values, vectors = eigh(_completed(matrix), workers)
    return np.maximum(values, 0.0) + least, vectors


def _completed(matrix: Array) -> Array:
    """The symmetric matrix of which only the lower triangle is given."""
    lower: Array = np.tril(matrix)
    return lower + np.tril(lower, -1).T


def _floor(norm: float, dtype: DType) -> float:
    limits = np.finfo(dtype)
    return max(float(limits.eps) * norm, float(limits.tiny))
