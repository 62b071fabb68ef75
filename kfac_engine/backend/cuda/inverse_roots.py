"""Inverse roots on a GPU without eigenvectors, where products of matrices are that much faster.

In float64, whose products take the residual below float32's rounding at any condition worth
inverting; float32 would leave ``6e-3`` at a condition of 1e6.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend import newton
from kfac_engine.backend.cuda.device import CupyDevice
from kfac_engine.backend.cuda.inverse import CupyInverses, Damped
from kfac_engine.kernels.symmetric import narrow

# Sides from which products are faster than eigenvectors, by compute capability: devices with as
# fast float64 as float32. Predictions, not measured: some 25 steps of 4 products of 2d³ flops at
# 30 Tflop/s, against a tridiagonalisation that keeps a few hundredths of such a device busy.
FROM_SIDE = {80: 256, 90: 256, 100: 256}
# A residual bounds the relative error of a root: no more than one rounding to float32.
_RESIDUAL = 2.0**-24
_MOST_STEPS = 40
# Float64 matrices that are alive at once for each one that is worked on; inverses need half.
MOST_COPIES = 10


def inverse_roots(
    device: CupyDevice,
    inverses: CupyInverses,
    matrices: Sequence[Array],
    dampings: Sequence[float],
    degrees: Sequence[int],
) -> list[Array | None]:
    """``(matrix + damping·I)^(−1/degree)`` of each matrix for which this is the quicker way.

    Args:
        device: The GPU.
        inverses: Runs work on matrices of equal side.
        matrices: Symmetric.
        dampings: For each matrix.
        degrees: For each matrix.

    Returns:
        None for a matrix that is small or float64, so badly conditioned that the iteration does not
        end, or not positive definite; also on a device with slow float64.
    """
    least = FROM_SIDE.get(device.capability)
    roots: list[Array | None] = [None] * len(matrices)
    if least is None:
        return roots
    fit = [i for i, m in enumerate(matrices) if len(m) >= least and m.dtype == np.float32]
    fit = [i for i in fit if dampings[i] > 0]
    if not fit:
        return roots
    bounds = device.download(device.xp.stack([_bound(matrices[i]) for i in fit]))
    for degree in sorted({degrees[i] for i in fit}):
        steps = {
            i: newton.steps_for(float(bound) / dampings[i] + 1.0, degree)
            for i, bound in zip(fit, bounds, strict=True)
            if degrees[i] == degree
        }
        chosen = [i for i, count in steps.items() if count <= _MOST_STEPS]
        if not chosen:
            continue
        given = Damped([matrices[i] for i in chosen], [dampings[i] for i in chosen])
        work = partial(_roots, device, degree, [int(steps[i]) for i in chosen])
        found = inverses.run(given, work, copies=MOST_COPIES)
        for i, (root, _, (residual,)) in zip(chosen, found, strict=True):
            if residual <= _RESIDUAL:  # not so for NaN
                roots[i] = root
    return roots


def _roots(
    device: CupyDevice, degree: int, steps: Sequence[int], work: Array, which: Sequence[int]
) -> tuple[Array, Array]:
    """Roots of a stack, and how wrong they are."""
    xp = device.xp
    bounds = abs(work).sum(axis=2).max(axis=1)
    # A few steps more than needed do no harm.
    roots = newton.inverse_roots(work, degree, bounds, max(steps[i] for i in which), xp)
    wrong = newton.residuals(roots, work, degree, xp)
    return narrow(device, xp.ascontiguousarray(roots), np.float32), wrong[:, None]


def _bound(matrix: Array) -> Array:
    """At least the largest eigenvalue: the largest sum of a row's absolute values."""
    bound: Array = abs(matrix).sum(axis=1).max().astype(np.float64)
    return bound
