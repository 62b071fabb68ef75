"""Sums over whole arrays of NumPy's: one pass at the speed of memory, nothing copied."""

import numpy as np

from kfac_engine._types import Array, DType


def squared_norm(x: Array) -> float:
    """The sum of squares.

    Args:
        x: Any shape and strides.

    Returns:
        Computed in the type of ``x``, half precision in single, integers in double; not finite
        where squares overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        flat = _flat(x)
        if flat is not None and x.dtype.char in "fd":
            return float(np.dot(flat, flat))
        axes = list(range(x.ndim))
        return float(np.einsum(x, axes, x, axes, [], dtype=summed_in(x.dtype)))


def summed_in(dtype: DType) -> DType:
    """The type in which squares of another are added up."""
    return np.dtype(np.float64) if dtype.kind in "biu" else np.promote_types(dtype, np.float32)


def all_finite(x: Array) -> bool:
    """Whether an array holds numbers alone."""
    # Squares of large numbers overflow: those few arrays are looked at again.
    return bool(np.isfinite(squared_norm(x))) or between_infinities(x)


def between_infinities(x: Array) -> bool:
    """``all_finite`` in two passes, which no number is too large for."""
    with np.errstate(invalid="ignore"):
        # NaN is both the least and the greatest.
        return not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def _flat(x: Array) -> Array | None:
    """All entries of an array without gaps as a view, in the order of memory; None of others."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    turned = x.transpose(order)
    return turned.reshape(-1) if turned.flags.c_contiguous else None
