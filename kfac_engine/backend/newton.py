"""Inverse roots of symmetric matrices by products alone: Newton's coupled iteration.

Where products are fast and eigenvectors are not, as on a GPU. On a CPU eigenvectors are faster.

Source: Higham 2008, Functions of Matrices, section 7.6; Guo & Higham 2006, SIAM J. Matrix Anal.
Appl. 28(3).
"""

from math import ceil, inf, log
from types import ModuleType

from kfac_engine._types import Array

# Steps after the smallest eigenvalue has grown to one: the convergence is then quadratic.
_LAST_STEPS = 7


def inverse_roots(stack: Array, degree: int, norms: Array, steps: int, xp: ModuleType) -> Array:
    """``A^(−1/degree)`` of each matrix of a stack.

    Keeps ``M = X^degree A``, which goes to the identity while ``X`` goes to the root. That ``M`` is
    kept, and not formed anew, makes the iteration stable.

    Args:
        stack: ``(n, d, d)``, symmetric and positive definite.
        degree: At least one.
        norms: ``(n,)``, at least the largest eigenvalues.
        steps: How many; see ``steps_for``.
        xp: The array library.

    Returns:
        ``(n, d, d)``, symmetric; anything where the matrix is not positive definite or ``steps``
        were too few: see ``residuals``.
    """
    eye = xp.eye(stack.shape[1], dtype=stack.dtype)
    # Eigenvalues of M begin in (0, (degree + 1) / 2]; below degree + 1 all of them converge.
    scales = (0.5 * (degree + 1) / norms)[:, None, None]
    M, X = scales * stack, scales ** (1 / degree) * eye
    for _ in range(steps):
        factor = ((degree + 1) * eye - M) / degree
        X, M = X @ factor, _power(factor, degree) @ M
        # Rounding takes symmetry away, and products of what is left of it grow.
        M = 0.5 * (M + M.swapaxes(1, 2))
    symmetric: Array = 0.5 * (X + X.swapaxes(1, 2))
    return symmetric


def residuals(roots: Array, stack: Array, degree: int, xp: ModuleType) -> Array:
    """Bounds of the relative errors of ``inverse_roots``, in the Frobenius norm.

    The bound is the norm of ``R = X^degree A − I``. An iterate is a polynomial of ``A``, so
    ``X = A^(−1/degree) (I + R)^(1/degree)``, and ``|(1 + r)^(1/degree) − 1| ≤ |r|`` for each
    eigenvalue ``r > −1`` of ``R``.

    Args:
        roots: ``(n, d, d)``, from ``inverse_roots``.
        stack: ``(n, d, d)``, the matrices.
        degree: Of the roots.
        xp: The array library.

    Returns:
        ``(n,)``; NaN where a root is.
    """
    eye = xp.eye(stack.shape[1], dtype=stack.dtype)
    norms: Array = xp.linalg.norm(_power(roots, degree) @ stack - eye, axis=(1, 2))
    return norms


def steps_for(condition: float, degree: int) -> float:
    """Steps after which the inverse root of a matrix of this condition is exact but for rounding.

    The smallest eigenvalue of ``M`` grows by nearly ``(1 + 1/degree)^degree`` a step.

    Args:
        condition: Largest over smallest eigenvalue, or a bound of it.
        degree: Of the root.

    Returns:
        A whole number; infinity for a singular matrix.
    """
    if not condition < inf:
        return inf
    growth = degree * log(1 + 1 / degree)
    return ceil(max(log(2 * condition), 0.0) / growth) + _LAST_STEPS


def _power(base: Array, degree: int) -> Array:
    """``base^degree`` by repeated squaring."""
    if degree == 1:
        return base
    half = _power(base, degree // 2)
    square: Array = half @ half
    return square @ base if degree % 2 else square
