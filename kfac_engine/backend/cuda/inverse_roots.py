"""Inverse roots on a GPU by products of matrices, on devices where products are faster.

The iteration runs in float64. Its residual then falls below the rounding of float32 at any useful
condition. In float32, an error of ``6e-3`` would remain at a condition of 1e6.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend import newton
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.matrix_batches import DampedMatrices, MatrixBatches
from kfac_engine.kernels.symmetric import narrow

# Least sizes for which products are faster than eigenvectors, by compute capability. The devices
# have float64 units as fast as those of float32. On an H200, roots of four matrices of 256 rows and
# one of 1024 take 11 ms by products and 29 ms by eigenvectors.
LEAST_SIZES = {80: 256, 90: 256, 100: 256}
# Bound of the residual, and so of the relative error of a root: one rounding to float32.
_RESIDUAL = 2.0**-24
_MOST_STEPS = 40
# Number of float64 matrices that are allocated at once for each matrix of a stack. Inverses need
# half of it.
MOST_COPIES = 10


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
            i: newton.steps_for(float(bound) / dampings[i] + 1.0, degree)
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
    roots = newton.inverse_roots(stack, degree, bounds, max(steps[i] for i in indices), xp)
    residuals = newton.residuals(roots, stack, degree, xp)
    return narrow(device, xp.ascontiguousarray(roots), np.float32), residuals[:, None]


def _bound(matrix: Array) -> Array:
    """Return the largest sum of absolute values in a row, which bounds all eigenvalues."""
    bound: Array = abs(matrix).sum(axis=1).max().astype(np.float64)
    return bound
