"""The refreshes of all factors of a collection: their keys, costs and owners."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import inf, isinf, prod
from typing import Any

import numpy as np

from kfac_engine.backend.namespace import is_recorded
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor, begin_refresh
from kfac_engine.curvature.factors.refresh import UNDIVIDED, Division
from kfac_engine.curvature.schedule import GrowingPlanner, Planner, Schedule, Work

# Largest share of the refreshes in the operations of the steps while periods grow.
_EARLY_SHARE = 0.2
# Operations in single precision that take the time of one in double precision, as of an inverse.
_DOUBLE = 2
# Number of operations of a refresh that takes milliseconds.
_CHEAP = 1e9


class Refreshes:
    """Refreshes of the factors that store inverses or powers, by key.

    The key of a factor is its position in ``collection.get_factors()``, as text.

    Args:
        collection: The registered layers; their factors are instantiated.

    Attributes:
        division: Divides the refreshes among processes.
    """

    def __init__(self, collection: LayerCollection) -> None:
        self._collection = collection
        self._latest: tuple[str, ...] = ()
        self.division: Division = UNDIVIDED

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Every refresh with its cost, for ``schedule.Planner``; the shapes must be known."""
        shapes = refreshed_shapes(self._collection)
        factors = self._factors
        costs = {key: sum(map(refresh_cost, shapes[id(f)])) for key, f in factors.items()}
        owners, ranks = self.division.owners(factors), self.division.ranks
        return tuple(Work(key, costs[key], owners.get(key), ranks) for key in factors)

    def early_rates(
        self, repeats: Callable[[FisherBlock], float] | None = None
    ) -> tuple[float, float]:
        """Return two rates, from which ``least_period`` computes the least period of refreshes.

        The reciprocal of the period is the first rate times the number of examples of a batch, plus
        the second rate. With this period, refreshes of all factors are at most 20 % of the
        operations. Both rates are infinite if a refresh takes milliseconds. They follow from sizes,
        so that periods are the same in each run and on each process.

        ``repeats`` returns the number of rows of each example in the factors of a block, which is
        measured by default.
        """
        refresh = sum(work.cost for work in self.works)
        if refresh < _CHEAP:
            return inf, inf
        refresh *= _DOUBLE * (1 / _EARLY_SHARE - 1)
        measured = lambda block: max(factor.repeats or 1.0 for factor in block.factors)  # noqa: E731
        rows_of = repeats or measured
        passes = products = 0.0
        for key, block in self._collection.fisher_blocks.items():
            shapes = [self._collection.require_shape(name) for name in uses(key)]
            numbers = sum(map(prod, shapes))
            # A product of the forward pass, and two of the backward pass; token ids select rows.
            if not block.selects_rows:
                passes += 3 * numbers * rows_of(block)
            sides = block.factor_shapes(shapes)
            products += numbers * sum(shape[-1] for shape in sides if len(shape) > 1)
        return passes / refresh, products / refresh

    def begin(self, keys: Iterable[str] | None = None) -> Callable[[], None]:
        """Begin to refresh factors, by default all; see ``factors.base.begin_refresh``.

        The returned function waits for the results and stores them.
        """
        factors = [self._factors[key] for key in (self._factors if keys is None else keys)]
        return begin_refresh(factors, self._collection.backend, self.division)

    def planner(self, schedule: Schedule) -> Planner:
        """Return a planner for ``run``, with the period of a schedule."""
        return Planner(self.works, schedule)

    def growing_planner(self, schedule: Schedule) -> GrowingPlanner:
        """Return a planner for ``run``, with periods that grow."""
        return GrowingPlanner(
            self.works, schedule, lambda examples: least_period(self.early_rates(), examples)
        )

    def wait(self) -> None:
        """Complete the refreshes that an earlier ``run`` began."""
        for factor in self._factors.values():
            factor.wait()
        self._latest = ()

    def run(self, planner: Planner, counter: int, bound: int | None = None) -> None:
        """Refresh the factors that are due; with ``schedule.overlap`` only begin to.

        The arguments are as for ``Planner.refreshes``, and the errors as for ``begin``.
        """
        due = planner.refreshes(counter, bound)
        finish = self.begin(due) if due else None
        if finish and (not planner.schedule.overlap or counter == 0):
            finish()
        self._latest = due

    def advance(self, planner: Planner, counter: int) -> tuple[str, ...]:
        """Record that a call succeeded; return the keys that it refreshed."""
        planner.advance(counter, self._latest)
        return self._latest

    @cached_property
    def _factors(self) -> dict[str, FisherFactor]:
        factors = enumerate(self._collection.get_factors())
        return {str(index): factor for index, factor in factors if factor.has_inverses}


def least_period(rates: tuple[Any, Any], examples: Any) -> Any:
    """Return the least number of steps between two refreshes, for ``Refreshes.early_rates``.

    ``examples`` is the number of examples of a batch, or a recorded number.
    """
    if isinf(rates[0]):
        return 1
    steps = 1 / (rates[0] * examples + rates[1])
    return 1 + (steps.astype(np.int64) if is_recorded(steps) else int(steps))


def factor_shapes(collection: LayerCollection) -> dict[int, tuple[int, ...]]:
    """Return the shape of the average of each factor, by ``id``, before any batch is measured.

    The collection has the shapes of its parameters.
    """
    shapes: dict[int, tuple[int, ...]] = {}
    for key, block in collection.fisher_blocks.items():
        averages = block.factor_shapes([collection.require_shape(name) for name in uses(key)])
        shapes |= {id(f): shape for f, shape in zip(block.factors, averages, strict=True)}
    return shapes


def refreshed_shapes(collection: LayerCollection) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return the shapes of the averages that each refresh reads, by the ``id`` of the factor.

    These are factors that store inverses or powers. Most read their own average only. The
    eigenvalues of EKFAC read the two factors of their Kronecker product.
    """
    factors, shapes = collection.get_factors(), factor_shapes(collection)
    read = averaged_shapes(factors, [shapes[id(factor)] for factor in factors])
    return {
        id(factor): averages
        for factor, averages in zip(factors, read, strict=True)
        if factor.has_inverses
    }


def averaged_shapes(
    factors: Sequence[FisherFactor], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the shapes of the averages that the refresh of each factor reads.

    ``shapes`` has the shape of the average of each factor. ``factors`` must include every factor
    whose average a refresh reads.
    """
    known = {id(f.average): shape for f, shape in zip(factors, shapes, strict=True)}
    return [tuple(known[id(average)] for average in f.averages) for f in factors]


def refresh_cost(shape: tuple[int, ...]) -> float:
    """Return the number of multiplications of a refresh, ``d³`` for each matrix.

    The average has the shape ``(d, d)``, or ``(m, d, d)`` for a stack of ``m`` matrices.
    """
    return float(prod(shape)) * (shape[-1] if shape else 1)
