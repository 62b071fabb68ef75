"""Sums over arrays of NumPy's: one pass at the speed of memory, nothing copied."""

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


def example_sums(x: Array, ds: Array, summed: tuple[int, ...]) -> Array:
    """``[Σ x∘ds, Σ ds]`` of each example: products are added up as they are made.

    Args:
        x: As many axes as ``ds``, each as long or of length one.
        ds: The batch first, in the type of ``x``.
        summed: Axes; not the batch axis.

    Returns:
        ``(n, 2·entries)``; entries are along the other axes, in row-major order.
    """
    axes = list(range(ds.ndim))
    kept = [axis for axis in axes if axis not in summed]
    products = np.einsum(np.broadcast_to(x, ds.shape), axes, ds, axes, kept)
    sums = np.einsum(ds, axes, kept)
    joined: Array = np.concatenate([part.reshape(len(ds), -1) for part in (products, sums)], axis=1)
    return joined


def _flat(x: Array) -> Array | None:
    """All entries of an array without gaps as a view, in the order of memory; None of others."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    turned = x.transpose(order)
    return turned.reshape(-1) if turned.flags.c_contiguous else None
