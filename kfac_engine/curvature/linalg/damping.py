"""The split of the damping of a Kronecker block between its two factors."""

from math import isfinite, sqrt

from kfac_engine.errors import InputError, NonFiniteError


def pi_correction(trace_a: float, dim_a: int, trace_g: float, dim_g: int) -> float:
    """Return the ratio π of the damping of two factors.

    It makes ``(A + π√λ·I) ⊗ (G + √λ/π·I)`` closest to ``A ⊗ G + λ·I`` in trace norm.

    Args:
        trace_a: Trace of the undamped input factor, the homogeneous coordinate included.
        dim_a: Number of its rows.
        trace_g: Trace of the undamped output factor.
        dim_g: Number of its rows.

    Returns:
        ``sqrt((tr A / dim A) / (tr G / dim G))``, or 1 if a trace is zero: a factor
        without statistics has no scale.

    Raises:
        NonFiniteError: A trace is NaN or infinite.
        InputError: A trace is negative, so that the matrix is not a second moment.

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
