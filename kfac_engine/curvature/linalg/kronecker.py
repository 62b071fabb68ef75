"""Multiplies by a symmetric factor, and splits the damping between the factors A and G."""

from math import isfinite, sqrt

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import InputError, NonFiniteError

# Up to this number of rows, BLAS multiplies rows by a matrix of this side, or a larger one, faster
# than the matrix by as many columns.
_FEW, _LARGE = 64, 256


def symmetric_product(matrix: Array, x: Array, backend: Backend) -> Array:
    """Return ``matrix · x`` of a symmetric matrix, or of a stack of them, in the order of ``x``.

    If the columns of ``x`` are contiguous, those of the result are, so that nothing is transposed.
    """
    transposed = x.swapaxes(-2, -1)
    by_column = transposed.flags.c_contiguous and not x.flags.c_contiguous
    if by_column or (x.shape[-1] <= _FEW and matrix.shape[-1] >= _LARGE):
        return backend.matmul(transposed, matrix).swapaxes(-2, -1)
    return backend.matmul(matrix, x)


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
            f"the factors' traces are {trace_a} and {trace_g}, but traces of second "
            f"moments are not negative."
        )
    if trace_a == 0.0 or trace_g == 0.0:
        return 1.0
    # The ratio of means cannot overflow; products could.
    return sqrt(trace_a / dim_a) / sqrt(trace_g / dim_g)
