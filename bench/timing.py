"""Wall times of repeated runs, summed up."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """Wall times of one contender, in seconds.

    Attributes:
        median: Half of the runs were faster; a mean where something happens in few of them only.
        low: A quarter of the runs were faster.
        high: A quarter of the runs were slower.
    """

    median: float
    low: float
    high: float


def spread(times: Sequence[float]) -> Spread:
    """Median and quartiles of at least two times."""
    low, _, high = quantiles(times, n=4, method="inclusive")
    return Spread(median(times), low, high)
