"""Multiplies by ``A ⊗ G`` without forming it, and splits the damping between A and G.

A gradient of a layer is a matrix ``V``, ``(d_in, d_out)``, flattened row by row. Entry
``[i·d_out + o, j·d_out + p]`` of ``A ⊗ G`` is ``A[i, j]·G[o, p]``.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite, sqrt

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.threads import Task
from kfac_engine.errors import InputError, NonFiniteError, ShapeError

# Up to this number of rows, BLAS multiplies rows by a matrix of this side, or a larger one, faster
# than the matrix by as many columns.
_FEW, _LARGE = 64, 256


def symmetric_product(matrix: Array, x: Array, backend: Backend) -> Array:
    """Return ``matrix · x`` of a symmetric matrix, or of a stack of them."""
    if x.shape[-1] <= _FEW and matrix.shape[-1] >= _LARGE:
        return backend.matmul(x.swapaxes(-2, -1), matrix).swapaxes(-2, -1)
    return backend.matmul(matrix, x)


def multiply_parts(
    A: Array,
    G: Array,
    V: Sequence[Array],
    out: Sequence[Array],
    backend: Backend,
    *,
    scale: float = 1.0,
) -> None:
    """Compute ``scale · A V G`` of symmetric A and G, and V with its last row in a separate array.

    ``V`` has the rows of the gradient but the last, ``(d_in − 1, d_out)``, and the last,
    ``(d_out,)``, or all rows in one array. The weight and the bias of a layer are two arrays, with
    any strides; neither is copied. ``out`` has arrays of the shapes of ``V`` in other memory. The
    rows of ``A`` are divided among threads; a task computes both products of its rows.
    """
    d_in, d_out = len(V[0]) + len(V) - 1, V[0].shape[-1]
    if A.shape != (d_in, d_in) or G.shape != (d_out, d_out):
        raise ShapeError(
            f"factors of shapes {A.shape} and {G.shape} cannot multiply a gradient of shape "
            f"{(d_in, d_out)}."
        )
    work = float(d_in) * d_out * (d_in + d_out)
    multiply = partial(_multiply_rows, A, G, V, out, backend, scale)
    bands = backend.row_blocks(d_in, work)
    if len(bands) == 1:
        multiply(bands[0])
    else:
        backend.run_parallel([Task(work / len(bands), partial(multiply, band)) for band in bands])


def _multiply_rows(
    A: Array,
    G: Array,
    V: Sequence[Array],
    out: Sequence[Array],
    backend: Backend,
    scale: float,
    rows: slice,
) -> None:
    """Compute a slice of the rows of ``scale · A V G``."""
    weights = len(V[0])
    if len(V) > 1:
        product = backend.matmul(A[rows, :weights], V[0])
        backend.add_outer(product, A[rows, weights], V[1], scale, scale)
    else:
        one_band = rows.stop - rows.start == len(A)
        product = symmetric_product(A, V[0], backend) if one_band else backend.matmul(A[rows], V[0])
        if scale != 1.0:
            product *= scale
    above = slice(rows.start, min(rows.stop, weights))
    backend.matmul(product[: above.stop - above.start], G, out[0][above])
    if rows.stop > weights:
        backend.matmul(product[-1], G, out[1])


def pi_correction(trace_a: float, dim_a: int, trace_g: float, dim_g: int) -> float:
    """Return the ratio π of the damping of two factors.

    It makes ``(A + π√λ·I) ⊗ (G + √λ/π·I)`` closest to ``A ⊗ G + λ·I`` in trace norm: it is
    ``sqrt((tr A / dim A) / (tr G / dim G))``, or 1 if a trace is zero, because a factor without
    statistics has no scale. The homogeneous coordinate is a row of A. A trace that is not finite,
    or negative, raises an error.

    Source: Martens & Grosse 2015, arXiv:1503.05671, section 6.3.
    """
    if not (isfinite(trace_a) and isfinite(trace_g)):
        raise NonFiniteError(
            f"the factors' traces are {trace_a} and {trace_g}; look for overflow in their "
            f"statistics."
        )
    if trace_a < 0.0 or trace_g < 0.0:
        raise InputError(
            f"the factors' traces are {trace_a} and {trace_g}; those of second moments are "
            f"not negative."
        )
    if trace_a == 0.0 or trace_g == 0.0:
        return 1.0
    # The ratio of means cannot overflow; products could.
    return sqrt(trace_a / dim_a) / sqrt(trace_g / dim_g)
