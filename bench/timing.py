"""Median and quartiles of repeated runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """Wall times of one contender, in seconds.

    Attributes:
        median: Half of the runs were faster.
        low: A quarter of the runs were faster.
        high: A quarter of the runs were slower.
    """

    median: float
    low: float
    high: float


def spread(times: Sequence[float]) -> Spread:
    """Return the median and the quartiles of times; of a single time, all three equal it."""
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return Spread(median(times), low, high)


def milliseconds(seconds: float) -> str:
    """Return milliseconds as text with three digits, or all digits before the point."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"
