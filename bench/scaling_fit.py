"""Exponents: how a cost grows with a size."""

from collections.abc import Sequence

import numpy as np

# What exponents may exceed the expected ones by before they are marked: fits over a few sizes.
MARGIN, _MARK = 0.15, " !"


def fitted(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Slope of the line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def growth(found: float, expected: float) -> str:
    """An exponent beside the expected one, marked if it is larger."""
    return f"size^{found:.2f}, at most {expected:g}{_MARK * (found > expected + MARGIN)}"
