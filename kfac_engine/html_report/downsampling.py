"""Reduction of long series to a bounded number of points, which keeps their extremes."""

from itertools import pairwise

import numpy as np

from kfac_engine._types import Array


def extremes(values: Array, most: int) -> Array:
    """Return the indices of at most ``most`` values: all, or the extremes of ranges of equal size.

    The first, the last, the smallest and the largest value are among them. Ranges of NaN have one
    index.

    Args:
        values: Any numbers, ``(n,)``.
        most: At least 4.

    Returns:
        Ascending indices.
    """
    n = len(values)
    if n <= most:
        return np.arange(n)
    chosen = {0, n - 1}
    for start, end in ranges(n, (most - 2) // 2):
        part = values[start:end]
        if np.isnan(part).all():
            chosen.add(start)
        else:
            chosen |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def ranges(n: int, most: int) -> list[tuple[int, int]]:
    """Divide ``n`` entries into at most ``most`` ranges ``(start, end)`` of nearly equal size."""
    edges = np.linspace(0, n, min(n, most) + 1).astype(int).tolist()
    return list(pairwise(edges))


def means(values: Array, parts: list[tuple[int, int]]) -> Array:
    """Return the mean of the finite values in each range; NaN where there is none."""
    finite = (values[start:end][np.isfinite(values[start:end])] for start, end in parts)
    return np.array([part.mean() if part.size else np.nan for part in finite])
