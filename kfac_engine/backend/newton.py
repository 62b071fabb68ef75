"""Inverse roots of symmetric matrices by Newton's coupled iteration, which only multiplies.

On a GPU, where products are fast, the iteration is faster than eigenvectors. On a CPU eigenvectors
are faster.

Source: Higham 2008, Functions of Matrices, section 7.6; Guo & Higham 2006, SIAM J. Matrix Anal.
Appl. 28(3).
"""

from math import ceil, inf, log
from types import ModuleType

from kfac_engine._types import Array

# Number of steps of quadratic convergence, after the smallest eigenvalue of M has reached about
# one.
_LAST_STEPS = 7


def inverse_roots(stack: Array, degree: int, norms: Array, steps: int, xp: ModuleType) -> Array:
    """Return ``A^(−1/degree)`` of each matrix of a stack, symmetric.

    The iteration updates ``M = X^degree A``, which converges to the identity while ``X`` converges
    to the root. It is stable because ``M`` is updated and not recomputed from ``X``.

    The stack is ``(n, d, d)``, symmetric and positive definite; ``norms`` are bounds of the largest
    eigenvalues. A root is unspecified if its matrix is not positive definite or if there are fewer
    steps than ``steps_for`` returns; see ``residuals``.
    """
    eye = xp.eye(stack.shape[1], dtype=stack.dtype)
    # Eigenvalues of M begin in (0, (degree + 1) / 2]; below degree + 1 all of them converge.
    scales = (0.5 * (degree + 1) / norms)[:, None, None]
    M, X = scales * stack, scales ** (1 / degree) * eye
    for _ in range(steps):
        factor = ((degree + 1) * eye - M) / degree
        X, M = X @ factor, _power(factor, degree) @ M
        # Rounding breaks the symmetry, and products amplify the error.
        M = 0.5 * (M + M.swapaxes(1, 2))
    symmetric: Array = 0.5 * (X + X.swapaxes(1, 2))
    return symmetric


def residuals(roots: Array, stack: Array, degree: int, xp: ModuleType) -> Array:
    """Return bounds ``(n,)`` of the relative errors of ``inverse_roots``, in the Frobenius norm.

    The bound is the norm of ``R = X^degree A − I``. An iterate is a polynomial of ``A``, so
    ``X = A^(−1/degree) (I + R)^(1/degree)``, and ``|(1 + r)^(1/degree) − 1| ≤ |r|`` for each
    eigenvalue ``r > −1`` of ``R``. The bound of a root with NaN is NaN.
    """
    eye = xp.eye(stack.shape[1], dtype=stack.dtype)
    norms: Array = xp.linalg.norm(_power(roots, degree) @ stack - eye, axis=(1, 2))
    return norms


def steps_for(condition: float, degree: int) -> float:
    """Return the number of steps after which an inverse root is exact up to rounding.

    In each step, the smallest eigenvalue of ``M`` grows by a factor of nearly
    ``(1 + 1/degree)^degree``. ``condition`` is the largest over the smallest eigenvalue, or a bound
    of it. The result is infinity for a singular matrix.
    """
    if not condition < inf:
        return inf
    growth = degree * log(1 + 1 / degree)
    return ceil(max(log(2 * condition), 0.0) / growth) + _LAST_STEPS


def _power(base: Array, degree: int) -> Array:
    """Return ``base^degree``, computed by repeated squaring."""
    if degree == 1:
        return base
    half = _power(base, degree // 2)
    square: Array = half @ half
    return square @ base if degree % 2 else square
