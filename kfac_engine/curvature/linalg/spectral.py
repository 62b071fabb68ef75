"""Computes powers of symmetric positive semi-definite matrices from their eigenvalues."""

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError


def eigh_power(
    values: Array,
    vectors: Array,
    damping: float | Array,
    exp: float,
    *,
    clip: float = 0.0,
    dtype: npt.DTypeLike | None = None,
    smallest: Array | None = None,
) -> Array:
    """Return ``(C + damping·I) ** exp`` of a matrix by its eigenvalues and eigenvectors.

    The eigenvalues of ``C`` ascend, ``(d,)``, or ``(g, d)`` of a stack, and the eigenvectors are
    columns, ``(d, d)`` or ``(g, d, d)``. Eigenvalues are clipped from below *before* the damping is
    added: rounding can make them negative, which must not reduce the damping. The damping of a
    stack may be ``(g,)``, on the host. ``smallest`` are the smallest eigenvalues on the host, if
    known.

    The result is exactly symmetric, by default in the type of the vectors. A damped eigenvalue that
    is negative, or zero under a negative exponent, raises an InputError.
    """
    xp = array_module(values)
    lowest = values[..., 0] if smallest is None else smallest
    least = float((array_module(lowest).maximum(lowest, clip) + damping).min())
    if least < 0.0 or (least == 0.0 and exp < 0):
        raise InputError(
            f"a matrix with damped eigenvalue {least} has no power {exp}; use a positive damping."
        )
    level = xp.asarray(damping, np.float64)[..., None] if np.ndim(damping) else damping
    damped = xp.maximum(values, clip) + level
    root = vectors * damped[..., None, :] ** (exp / 2)
    power = root @ root.swapaxes(-1, -2)
    # NumPy computes such a product by SYRK, which is exactly symmetric; other libraries do not.
    symmetric: Array = (0.5 * (power + power.swapaxes(-1, -2))).astype(
        dtype or vectors.dtype, copy=False
    )
    return symmetric
