"""Computes inverse roots on a GPU by Newton's coupled iteration, which only multiplies.

On devices where products are fast, the iteration is faster than eigenvectors. It runs in float64.
Its residual then falls below the rounding of float32 at any useful condition. In float32, an error
of ``6e-3`` would remain at a condition of 1e6.

Source: Higham 2008, Functions of Matrices, section 7.6; Guo & Higham 2006, SIAM J. Matrix Anal.
Appl. 28(3).
"""

from collections.abc import Sequence
from functools import partial
from math import ceil, inf, log
from types import ModuleType

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.matrix_batches import MOST_COPIES, DampedMatrices, MatrixBatches
from kfac_engine.kernels.symmetric import narrow

# Number of steps of quadratic convergence, after the smallest eigenvalue of M has reached about
# one.
_LAST_STEPS = 7


def newton_roots(stack: Array, degree: int, norms: Array, steps: int, xp: ModuleType) -> Array:
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
    """Return bounds ``(n,)`` of the relative errors of ``newton_roots``, in the Frobenius norm.

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


# Least sizes for which products are faster than eigenvectors, by compute capability. The devices
# have float64 units as fast as those of float32. On an H200, roots of four matrices of 256 rows and
# one of 1024 take 11 ms by products and 29 ms by eigenvectors.
LEAST_SIZES = {80: 256, 90: 256, 100: 256}
# Bound of the residual, and so of the relative error of a root: one rounding to float32.
_RESIDUAL = 2.0**-24
_MOST_STEPS = 40


def inverse_roots(
    device: CupyDevice,
    batches: MatrixBatches,
    matrices: Sequence[Array],
    dampings: Sequence[float],
    degrees: Sequence[int],
) -> list[Array | None]:
    """Return ``(matrix + damping·I)^(−1/degree)`` of matrices for which products are fastest.

    A root is None if the matrix is small or float64, if it is not positive definite or too
    ill-conditioned for the iteration, or if the device has slow float64.
    """
    least = LEAST_SIZES.get(device.capability)
    roots: list[Array | None] = [None] * len(matrices)
    if least is None:
        return roots
    large = [i for i, m in enumerate(matrices) if len(m) >= least and m.dtype == np.float32]
    large = [i for i in large if dampings[i] > 0]
    if not large:
        return roots
    bounds = device.download(device.xp.stack([_bound(matrices[i]) for i in large]))
    for degree in sorted({degrees[i] for i in large}):
        steps = {
            i: steps_for(float(bound) / dampings[i] + 1.0, degree)
            for i, bound in zip(large, bounds, strict=True)
            if degrees[i] == degree
        }
        chosen = [i for i, count in steps.items() if count <= _MOST_STEPS]
        if not chosen:
            continue
        damped = DampedMatrices([matrices[i] for i in chosen], [dampings[i] for i in chosen])
        work = partial(_roots, device, degree, [int(steps[i]) for i in chosen])
        outcomes = batches.run(damped, work, copies=MOST_COPIES)
        for i, (root, _, (residual,)) in zip(chosen, outcomes, strict=True):
            if residual <= _RESIDUAL:  # False for NaN
                roots[i] = root
    return roots


def _roots(
    device: CupyDevice, degree: int, steps: Sequence[int], stack: Array, indices: Sequence[int]
) -> tuple[Array, Array]:
    """Return the roots of a stack of matrices, and the norms of their residuals."""
    xp = device.xp
    bounds = abs(stack).sum(axis=2).max(axis=1)
    # More steps than a matrix needs do not change its root.
    roots = newton_roots(stack, degree, bounds, max(steps[i] for i in indices), xp)
    errors = residuals(roots, stack, degree, xp)
    return narrow(device, xp.ascontiguousarray(roots), np.float32), errors[:, None]


def _bound(matrix: Array) -> Array:
    """Return the largest sum of absolute values in a row, which bounds all eigenvalues."""
    bound: Array = abs(matrix).sum(axis=1).max().astype(np.float64)
    return bound
