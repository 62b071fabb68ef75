"""The refreshes of the factors of a run: when, how often, and at what cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod

from kfac_engine.html_report.run_log import RunLog
from kfac_engine.printable import printable

# Fields of a log.
FACTORS = "factors"
_TIME = "seconds/inverses"
# Factors of most models have two axes; a log may be hostile.
_MOST_AXES, _LARGEST_SIZE = 8, 1 << 31


@dataclass(slots=True)
class FactorRefreshes:
    """The refreshes of one factor.

    Attributes:
        name: Name of the factor.
        records: Indices of the records of its refreshes, ascending.
        seconds: Their time. The factors of a step are refreshed together: its time is divided in
            proportion to the cubes of their sizes.
    """

    name: str
    records: list[int] = field(default_factory=list)
    seconds: float = 0.0


def refreshes(log: RunLog) -> list[FactorRefreshes]:
    """Return the refreshes of each factor, in the order of their first refresh."""
    costs, times = _costs(log.run.get(FACTORS)), log.columns.get(_TIME)
    factors: dict[str, FactorRefreshes] = {}
    for index, names in enumerate(log.refreshed):
        time = 0.0 if times is None or not isfinite(times[index]) else float(times[index])
        total = sum(costs.get(name, 1.0) for name in names)
        for name in names:
            entry = factors.setdefault(name, FactorRefreshes(printable(name)))
            entry.records.append(index)
            entry.seconds += time * costs.get(name, 1.0) / total
    return list(factors.values())


def _costs(shapes: object) -> dict[str, float]:
    """Return the number of multiplications of the refresh of each factor."""
    if not isinstance(shapes, Mapping):
        return {}
    return {
        name: float(prod(shape)) * shape[-1]
        for name, shape in shapes.items()
        if isinstance(shape, list)
        and 0 < len(shape) <= _MOST_AXES
        and all(type(size) is int and 0 < size < _LARGEST_SIZE for size in shape)
    }
