"""Scaling exponents of a cost, fitted over a range of sizes."""

from collections.abc import Sequence

import numpy as np

# Tolerance of an exponent, which is fitted over a few sizes, and the mark of a larger one.
MARGIN, _MARK = 0.15, " !"


def fitted(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def growth(exponent: float, expected: float) -> str:
    """Return an exponent and the expected bound as text, marked if the bound is exceeded."""
    return f"size^{exponent:.2f}, at most {expected:g}{_MARK * (exponent > expected + MARGIN)}"
