"""Inverses and factors of damped symmetric matrices, in float64, by LAPACK.

A factor kept in float32 is known only to within its rounding: small eigenvalues may come out
negative. Working in float64 adds no second error (a float32 Cholesky inverse is wrong by about
``7e-9 · condition``) and costs less than twice the time.
"""

import logging
from collections.abc import Iterator

import numpy as np
from scipy import linalg
from scipy.linalg import lapack

from kfac_engine._types import Array, DType
from kfac_engine.backend.numpy_moments import mirror
from kfac_engine.errors import BackendError, InputError, NonFiniteError, ShapeError

_LOG = logging.getLogger(__name__)

# Dampings tried before the eigenvalues are clamped: each ten times the one before.
_LADDER = (1, 10, 100, 1000)

# Below this, squares of float64 numbers lose digits.
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
    limits = np.finfo(dtype)
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(matrix))
    if not _SMALLEST_NORM < norm < np.inf:
        # Squares overflowed or vanished, so the norm is taken relative to the largest entry.
        largest = max(float(np.abs(matrix).max()), float(limits.tiny))
        norm = largest * float(np.linalg.norm(matrix / largest))
    return max(float(limits.eps) * norm, float(limits.tiny))


def damped_inverse(matrix: Array, damping: float) -> Array:
    """``(matrix + damping·I)⁻¹``, symmetric, in the dtype of ``matrix``.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        damping: Added to the diagonal; at least ``damping_floor`` is.

    Returns:
        A new matrix ``(d, d)``. Where Cholesky's factorisation fails at ten, a hundred and a
        thousand times the damping too, the matrix is indefinite by more than rounding: then
        negative eigenvalues count as zero.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: The damping is negative or not finite, or there is nothing to invert.
    """
    for work in _damped(matrix, damping):
        upper, info = lapack.dpotrf(work.T, lower=0, clean=0, overwrite_a=1)
        if info == 0:
            inverse, info = lapack.dpotri(upper, lower=0, overwrite_c=1)
        if info == 0:
            return _symmetric(inverse.T, matrix)
    values, vectors = _clamped(matrix, damping)
    return _symmetric((vectors / values) @ vectors.T, matrix)


def damped_cholesky(matrix: Array, damping: float) -> Array:
    """Lower-triangular ``L`` with ``L Lᵀ = matrix + damping·I``, in the dtype of ``matrix``.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.
        damping: As for ``damped_inverse``, with the same retries.

    Returns:
        A new matrix ``(d, d)`` with a positive diagonal, zero above it.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: The damping is negative or not finite, or there is nothing to factor.
    """
    for work in _damped(matrix, damping):
        upper, info = lapack.dpotrf(work.T, lower=0, clean=1, overwrite_a=1)
        if info == 0:
            return _as_lower(upper, matrix)
    values, vectors = _clamped(matrix, damping)
    # With M = QΛQᵀ and √Λ Qᵀ = Q'R: M = Rᵀ R, a triangular root that cannot fail.
    R: Array = np.linalg.qr(np.sqrt(values)[:, None] * vectors.T).R
    return _as_lower(R * np.where(np.diagonal(R) < 0, -1.0, 1.0)[:, None], matrix)


def triangular_inverse(lower: Array) -> Array:
    """``L⁻¹`` of a lower-triangular matrix, lower-triangular, in its dtype.

    Args:
        lower: ``(d, d)``; what stands above the diagonal is not read.

    Returns:
        A new matrix ``(d, d)``, zero above the diagonal.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        InputError: An entry of the diagonal is zero.
    """
    check_square(lower)
    inverse, info = lapack.dtrtri(np.tril(lower).astype(np.float64).T, lower=0, overwrite_c=1)
    if info > 0:
        raise InputError(
            f"a triangular matrix with zero at [{info - 1}, {info - 1}] has no inverse."
        )
    result: Array = inverse.T.astype(lower.dtype)
    return result


def eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and orthonormal eigenvectors of a symmetric matrix.

    Args:
        matrix: ``(d, d)``, symmetric; its lower triangle is read.

    Returns:
        Values ``(d,)`` and vectors ``(d, d)`` as columns, float64.

    Raises:
        ShapeError: The matrix is not square.
        NonFiniteError: It holds NaN or infinity.
        BackendError: LAPACK's iteration did not converge.
    """
    check_square(matrix)
    try:
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
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ShapeError(f"a square matrix is needed, got one of shape {matrix.shape}.")
    if not np.isfinite(matrix).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(matrix))[0])
        raise NonFiniteError(
            f"a {matrix.shape} factor holds {matrix[bad]} at {list(bad)}; look for overflow in the "
            f"statistics it was averaged from."
        )


def _damped(matrix: Array, damping: float) -> Iterator[Array]:
    """Float64 copies with more and more on the diagonal, as long as they are asked for."""
    least = _least_damping(matrix, damping)
    for factor in _LADDER:
        if factor > 1:
            _LOG.warning(
                "a %s matrix is not positive definite with damping %.3g; trying %.3g",
                matrix.shape,
                least * factor / 10,
                least * factor,
            )
        work = matrix.astype(np.float64, order="C")
        work.reshape(-1)[:: len(work) + 1] += least * factor
        yield work


def _clamped(matrix: Array, damping: float) -> tuple[Array, Array]:
    """Damped eigenvalues with the negative ones taken as zero, and their vectors."""
    _LOG.warning("a %s matrix is indefinite; its negative eigenvalues are cut off", matrix.shape)
    values, vectors = eigh(matrix)
    return np.maximum(values, 0.0) + _least_damping(matrix, damping), vectors


def _least_damping(matrix: Array, damping: float) -> float:
    """The damping to start with, once the matrix is known to be fit for LAPACK."""
    check_square(matrix)
    if not 0.0 <= damping < np.inf:
        raise InputError(f"the damping must be zero or positive and finite, got {damping}.")
    if damping == 0.0 and not matrix.any():
        raise InputError(f"a zero matrix {matrix.shape} needs a positive damping to be inverted.")
    return max(damping, damping_floor(matrix.astype(np.float64), matrix.dtype))


def _symmetric(result: Array, like: Array) -> Array:
    found: Array = result.astype(like.dtype)
    mirror(found)
    return found


def _as_lower(upper: Array, like: Array) -> Array:
    found: Array = upper.T.astype(like.dtype, order="C")
    return found
