"""Times of several ways to the same result, measured fairly on a machine that others use too."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter


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


def time_in_turn(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Spread]:
    """Wall times of contenders that take turns, so that a busy moment hits all of them.

    Args:
        contenders: Name to what is timed. Each has run before: nothing is loaded or compiled here.
        rounds: How often each runs; at least two.

    Returns:
        Name to times.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contenders.items():
                start = perf_counter()
                run()
                times[name].append(perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return {name: spread(found) for name, found in times.items()}


def spread(times: Sequence[float]) -> Spread:
    """Median and quartiles of at least two times."""
    low, _, high = quantiles(times, n=4, method="inclusive")
    return Spread(median(times), low, high)
