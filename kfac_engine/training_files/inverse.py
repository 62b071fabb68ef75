"""Inverses of damped matrices by products alone, as the files compute them.

A matrix is inverted by halves: with P, B and D its blocks and ``S = D − Bᵀ P⁻¹ B``, the inverse
consists of products of P⁻¹, S⁻¹ and B. That takes fewer multiplications than one product of two
matrices of the size, and no decision in a run. The smallest blocks are inverted by Newton's
iteration, scaled so that the least eigenvalue grows nearly fourfold in a step (Pan & Schreiber
1991, "An improved Newton iteration for the generalized inverse of a matrix, with applications").
The eigenvalues of a Schur complement lie between those of the matrix, so that one bound of the
condition number determines the number of iterations of every block.

Matrices of equal size are one stack ``(k, d, d)``. The functions compute with arrays of NumPy and
with recorded ones.
"""

from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.recording.functions import identity_like
from kfac_engine.recording.recorded import Recorded

# Largest matrices that are not halved, and the residual of their scaled iterations, which two
# further iterations square.
_LEAF, _RESIDUAL = 100, 3e-2


def damped_inverses(matrices: Array, levels: Array, norms: Array, smallest: float) -> Array:
    """Return ``(matrix + level·I)⁻¹`` of each matrix of a stack.

    Args:
        matrices: Symmetric, ``(k, d, d)``.
        levels: Damping of each matrix, ``(k, 1, 1)``.
        norms: Bound of the largest eigenvalue of each damped matrix, ``(k, 1, 1)``.
        smallest: Bound of the smallest eigenvalue divided by the bound of the largest.

    Returns:
        Symmetric matrices.
    """
    return _by_halves(matrices + levels * _identity(matrices), norms, smallest)


def _by_halves(A: Array, norms: Array, smallest: float) -> Array:
    d = A.shape[-1]
    if d <= _LEAF:
        return _by_iteration(A, norms, smallest)
    half = d // 2
    P, B, D = A[:, :half, :half], A[:, :half, half:], A[:, half:, half:]
    inverse = _by_halves(P, norms, smallest)
    W = inverse @ B
    V = W @ (S := _by_halves(D - B.swapaxes(-1, -2) @ W, norms, smallest))
    top = np.concatenate([inverse + V @ W.swapaxes(-1, -2), -V], axis=-1)
    return np.concatenate([top, np.concatenate([-V.swapaxes(-1, -2), S], axis=-1)], axis=-2)


def _by_iteration(A: Array, norms: Array, smallest: float) -> Array:
    """Return the inverse of small matrices whose eigenvalues lie in ``[smallest, 1] · norm``."""
    twice = 2 * _identity(A)
    scale = 2 / (1 + smallest)
    start = scale / norms
    M, X, low = A * start, None, smallest * scale
    while True:
        low = low * (2 - low)
        scale = 2 / (1 + low)
        factor = (twice - M) * scale
        X = factor * start if X is None else X @ factor
        low *= scale
        if 1 - low <= _RESIDUAL:
            break
        M = _symmetric(factor @ M)
    for _ in range(2):
        X = _symmetric(X @ (twice - A @ _symmetric(X)))
    return X


def _symmetric(X: Array) -> Array:
    return 0.5 * (X + X.swapaxes(-1, -2))


def _identity(A: Any) -> Array:
    symbol = isinstance(A, Recorded)
    identity: Array = identity_like(A) if symbol else np.eye(A.shape[-1], dtype=A.dtype)
    return identity
