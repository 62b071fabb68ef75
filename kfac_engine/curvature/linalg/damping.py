"""How a Kronecker block shares its damping between its two factors."""

from math import isfinite, sqrt

from kfac_engine.errors import InputError, NonFiniteError


def pi_correction(trace_a: float, dim_a: int, trace_g: float, dim_g: int) -> float:
    """Ratio π that makes ``(A + π√λ·I) ⊗ (G + √λ/π·I)`` closest to ``A ⊗ G + λ·I`` in trace norm.

    Args:
        trace_a: Trace of the undamped input factor, the homogeneous coordinate included.
        dim_a: Its side.
        trace_g: Trace of the undamped output factor.
        dim_g: Its side.

    Returns:
        ``sqrt((tr A / dim A) / (tr G / dim G))``, or 1 when either trace is zero: a factor without
        statistics has no scale to share by.

    Raises:
        NonFiniteError: A trace is NaN or infinite.
        InputError: A trace is negative: the matrix is no second moment.

    Source: Martens & Grosse 2015, arXiv:1503.05671, section 6.3.
    """
    if not (isfinite(trace_a) and isfinite(trace_g)):
        raise NonFiniteError(
            f"the factors' traces are {trace_a} and {trace_g}; look for overflow in their "
            f"statistics."
        )
    if trace_a < 0.0 or trace_g < 0.0:
        raise InputError(
            f"the factors' traces are {trace_a} and {trace_g}; a second moment has none below zero."
        )
    if trace_a == 0.0 or trace_g == 0.0:
        return 1.0
    # Ratio of means, not of products: those could overflow.
    return sqrt(trace_a / dim_a) / sqrt(trace_g / dim_g)
