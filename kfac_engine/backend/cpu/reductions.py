"""Reduces NumPy arrays in one pass without copies."""

from math import isfinite

import numpy as np

from kfac_engine._types import Array, DType


def squared_norm(x: Array) -> float:
    """Return the sum of the squares of all entries; it is not finite if squares overflow.

    Half precision is summed in float32, integers in float64, and other types in their own type.
    """
    # The BLAS kernels of old processors end the process on arrays that are not aligned, such as the
    # members of a mapped archive.
    if x.dtype.char in "fd" and x.flags.aligned:
        flat = x if x.flags.c_contiguous else _flat(x)
        if flat is not None:  # unlike others, this product does not warn of an overflow
            return float(np.vdot(flat, flat))
    with np.errstate(over="ignore", invalid="ignore"):
        axes = list(range(x.ndim))
        return float(np.einsum(x, axes, x, axes, [], dtype=summed_in(x.dtype)))


def summed_in(dtype: DType) -> DType:
    """Return the element type in which squares are summed."""
    return np.dtype(np.float64) if dtype.kind in "biu" else np.promote_types(dtype, np.float32)


def all_finite(x: Array) -> bool:
    """Return whether all entries of an array are finite."""
    # Squares of large numbers overflow, so an infinite sum needs a second check.
    return isfinite(squared_norm(x)) or between_infinities(x)


def between_infinities(x: Array) -> bool:
    """Return whether all entries are finite, from their minimum and maximum."""
    with np.errstate(invalid="ignore"):
        # The minimum and the maximum of an array with NaN are NaN.
        return not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def example_sums(x: Array, ds: Array, summed: tuple[int, ...]) -> Array:
    """Return ``[Σ x∘ds, Σ ds]`` of each example; no array of products is allocated.

    The first axis of ``ds`` is the batch. ``x`` has the axes of ``ds``, each of the same length or
    of length one. The result is ``(n, 2·entries)``; entries are the axes that are not summed, in
    row-major order.
    """
    axes = list(range(ds.ndim))
    entries = [axis for axis in axes if axis not in summed]
    products = np.einsum(np.broadcast_to(x, ds.shape), axes, ds, axes, entries)
    sums = np.einsum(ds, axes, entries)
    joined: Array = np.concatenate([part.reshape(len(ds), -1) for part in (products, sums)], axis=1)
    return joined


def _flat(x: Array) -> Array | None:
    """Return a flat view of an array in memory order; None for an array with gaps."""
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    transposed = x.transpose(order)
    return transposed.reshape(-1) if transposed.flags.c_contiguous else None
