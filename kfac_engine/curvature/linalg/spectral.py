"""Powers of symmetric positive semi-definite matrices through their eigenvalues."""

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
    """``(C + damping·I) ** exp`` of the matrix ``C`` with these eigenvalues and eigenvectors.

    Eigenvalues are clipped from below *before* the damping is added: rounding may have made them
    negative, and the damping must not pay for that.

    Args:
        values: Eigenvalues of ``C``, ``(d,)``, ascending; of a stack ``(g, d)``.
        vectors: Orthonormal eigenvectors as columns, ``(d, d)`` or ``(g, d, d)``.
        damping: Added to each clipped eigenvalue; for a stack one number or ``(g,)``, on the host.
        exp: Any real exponent.
        clip: Least eigenvalue before damping.
        dtype: Of the result; that of the vectors if left out.
        smallest: The smallest eigenvalue of each matrix on the host, where it is known there.

    Returns:
        ``Q diag((max(values, clip) + damping) ** exp) Qᵀ``, ``(d, d)``, exactly symmetric; a stack
        of them for a stack.

    Raises:
        InputError: A damped eigenvalue is negative, or zero under a negative exponent.
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
    # Only SYRK, which NumPy takes for such a product, is symmetric to the last bit.
    symmetric: Array = (0.5 * (power + power.swapaxes(-1, -2))).astype(
        dtype or vectors.dtype, copy=False
    )
    return symmetric
