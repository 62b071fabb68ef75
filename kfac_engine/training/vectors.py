"""Arithmetic of vectors over the parameters: name to array, in place where possible.

Temporary arrays of the size of a parameter cost more than the arithmetic, because the operating
system provides and takes back their memory in each step. Results are therefore written to arrays
that exist.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from scipy.linalg import blas

from kfac_engine._types import Array

Vector: TypeAlias = Mapping[str, Array]

# Entries of a part of an array.
_PART = 1 << 16

_AXPY: Mapping[str, Any] = {"f": blas.saxpy, "d": blas.daxpy}


def add_multiple(out: Array, factor: float, array: Array) -> None:
    """Add ``factor · array`` to ``out``, in place; both have the same shape and type."""
    axpy = _AXPY.get(out.dtype.char) if _is_flat(out) and _is_flat(array) else None
    if axpy is None or array.dtype != out.dtype or not out.size:
        out += factor * array
    else:
        axpy(array.reshape(-1), out.reshape(-1), a=factor)


def combine(out: Array, factor: float, array: Array, other_factor: float, other: Array) -> None:
    """Write ``factor · array + other_factor · other`` to ``out``, which may be ``array``."""
    np.multiply(array, factor, out=out)
    add_multiple(out, other_factor, other)


def dot(left: Vector, right: Vector) -> float:
    """Return the inner product of two vectors; the names of the first one count."""
    return sum(float(np.vdot(array, right[name])) for name, array in left.items())


def zeros(parameters: Vector) -> dict[str, Array]:
    """Return an array of zeros for each parameter, by name."""
    return {name: np.zeros_like(value) for name, value in parameters.items()}


def parts(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of equal ranges of arrays of one shape, which stay in the cache of a core.

    Arrays that are not contiguous, or not of the host, are one part.
    """
    if not all(map(_is_flat, arrays)) or arrays[0].size <= _PART:
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _PART):
        yield tuple(array[start : start + _PART] for array in flat)


def _is_flat(array: Array) -> bool:
    return isinstance(array, np.ndarray) and bool(array.flags.c_contiguous)
