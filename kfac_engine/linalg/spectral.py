"""Powers of symmetric positive semi-definite matrices through their eigenvalues."""

import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError


def eigh_power(
    values: Array,
    vectors: Array,
    damping: float,
    exp: float,
    *,
    clip: float = 0.0,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """``(C + damping·I) ** exp`` of the matrix ``C`` with these eigenvalues and eigenvectors.

    Eigenvalues are clipped from below *before* the damping is added: rounding may have made them
    negative, and the damping must not pay for that.

    Args:
        values: Eigenvalues of ``C``, ``(d,)``.
        vectors: Orthonormal eigenvectors as columns, ``(d, d)``.
        damping: Added to each clipped eigenvalue.
        exp: Any real exponent.
        clip: Least eigenvalue before damping.
        dtype: Of the result; that of the vectors if left out.

    Returns:
        ``Q diag((max(values, clip) + damping) ** exp) Qᵀ``, ``(d, d)``, exactly symmetric.

    Raises:
        InputError: A damped eigenvalue is negative, or zero under a negative exponent.
    """
    xp = array_module(values)
    damped = xp.maximum(values, clip) + damping
    smallest = float(damped.min())
    if smallest < 0.0 or (smallest == 0.0 and exp < 0):
        raise InputError(
            f"a matrix with damped eigenvalue {smallest} has no power {exp}; use a positive "
            f"damping."
        )
    root = vectors * damped ** (exp / 2)
    power = root @ root.T
    # Only SYRK, which NumPy takes for such a product, is symmetric to the last bit.
    symmetric: Array = (0.5 * (power + power.T)).astype(dtype or vectors.dtype, copy=False)
    return symmetric
