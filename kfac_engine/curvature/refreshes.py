"""The refreshes of all factors of a collection: their keys, costs and owners.

The drift of a factor is the change of its average since its latest refresh, relative to the norm of
the average at that refresh. It is estimated from sixteen rows of the lower triangle, in time
proportional to the size of the matrix; the rows at that refresh are stored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, isinf, prod, sqrt
from time import perf_counter
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module, is_recorded
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor, begin_refresh
from kfac_engine.curvature.factors.refresh import UNDIVIDED, Division
from kfac_engine.curvature.schedule import (
    ADAPTIVE,
    POLICIES,
    GrowingPlanner,
    Planner,
    Schedule,
    Work,
)
from kfac_engine.errors import UnsupportedError

_SAMPLED_ROWS = 16
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
        self._samples: dict[str, tuple[Array, ...]] = {}
        self._latest: tuple[tuple[str, ...], float] = ((), 0.0)
        self.division: Division = UNDIVIDED

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Every refresh with its cost, for ``schedule.Planner``; the shapes must be known."""
        shapes = refreshed_shapes(self._collection)
        parameters: dict[int, list[str]] = {}
        for params, block in self._collection.fisher_blocks.items():
            for number in dict.fromkeys(map(id, block.factors)):
                parameters.setdefault(number, []).extend(uses(params))
        factors = self._factors
        costs = {key: sum(map(refresh_cost, shapes[id(f)])) for key, f in factors.items()}
        owners, ranks = self.division.owners(factors), self.division.ranks
        return tuple(
            Work(key, costs[key], tuple(parameters[id(factor)]), owners.get(key), ranks)
            for key, factor in factors.items()
        )

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
        """Return a planner for ``run``, with the periods of a schedule.

        ``UnsupportedError`` is raised if the policy reads times or averages of one process, and
        there are several.
        """
        self._check_policy(schedule.policy)
        return Planner(self.works, schedule)

    def growing_planner(self, schedule: Schedule) -> GrowingPlanner:
        """Return a planner for ``run``, with periods that grow; raises as ``planner`` does."""
        self._check_policy(schedule.policy)
        return GrowingPlanner(
            self.works, schedule, lambda examples: least_period(self.early_rates(), examples)
        )

    def wait(self) -> None:
        """Complete the refreshes that an earlier ``run`` began; their time belongs to this call."""
        start = perf_counter()
        for factor in self._factors.values():
            factor.wait()
        self._latest = (), perf_counter() - start

    def due(
        self, planner: Planner, counter: int, bound: int | None = None, *, moved: bool = True
    ) -> tuple[str, ...]:
        """Return the keys of the factors that ``run`` refreshes in a call, counted from 0.

        ``bound`` is the largest period of any factor in this call, ``planner.bound``. ``moved``
        says whether averages have changed since the last call.
        """
        drifts = self._drifts_for(planner, counter, moved=moved)
        return planner.refreshes(counter, drifts, bound)

    def run(
        self, planner: Planner, counter: int, bound: int | None = None, *, moved: bool = True
    ) -> None:
        """Refresh the factors that are due; with ``schedule.overlap`` only begin to.

        The arguments are as for ``due``, and the errors as for ``begin``.
        """
        start = perf_counter()
        due = self.due(planner, counter, bound, moved=moved)
        finish = self.begin(due) if due else None
        if finish and (not planner.schedule.overlap or counter == 0):
            finish()
        self._latest = due, self._latest[1] + perf_counter() - start

    def advance(self, planner: Planner, counter: int, seconds: float) -> tuple[str, ...]:
        """Record that a call took ``seconds`` and succeeded; return the keys that it refreshed."""
        due, spent = self._latest
        planner.advance(counter, due, seconds, spent)
        if planner.reads_drifts:
            self._samples |= {key: self._sampled(key) for key in due}
        return due

    def drifts(self) -> dict[str, float]:
        """Return the drift of each factor since the latest ``run`` that refreshed it, by key."""
        backend, squares = self._collection.backend, []
        for key, old in self._samples.items():
            for now, before in zip(self._sampled(key), old, strict=True):
                squares += [((now - before) ** 2).sum(), (before**2).sum()]
        sums = iter(float(total) for total in backend.download(squares))
        return {
            key: max(_ratio(next(sums), next(sums)) for _ in old)
            for key, old in self._samples.items()
        }

    def saved(self) -> dict[str, Array]:
        """Return the state for a checkpoint: the sampled rows on the host, by name."""
        to_numpy = self._collection.backend.to_numpy
        return {
            f"{key}/{index}": to_numpy(rows)
            for key, samples in self._samples.items()
            for index, rows in enumerate(samples)
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore samples by name from a checkpoint.

        Samples that do not fit are dropped. A factor without samples has an unknown drift, and the
        policy ``"drift"`` refreshes it in the next call.
        """
        backend = self._collection.backend
        self._samples = {}
        for key, factor in self._factors.items():
            names = [f"{key}/{index}" for index, _ in enumerate(factor.averages)]
            if factor.average.value is not None and all(name in arrays for name in names):
                samples = tuple(backend.asarray(arrays[name]).copy() for name in names)
                if [s.shape for s in samples] == [s.shape for s in self._sampled(key)]:
                    self._samples[key] = samples

    def _check_policy(self, policy: str) -> None:
        if self.division is not UNDIVIDED and policy in ADAPTIVE:
            raise UnsupportedError(
                f"policy '{policy}' reads times or averages of one process; with a "
                f"communicator, choose {', '.join(map(repr, POLICIES))}."
            )

    def _drifts_for(
        self, planner: Planner, counter: int, *, moved: bool
    ) -> dict[str, float] | None:
        """Return the drifts that a planner reads."""
        if not planner.reads_drifts or not counter:
            return None
        # A factor that had moved enough was refreshed in the call that moved its average.
        return self.drifts() if moved else dict.fromkeys(self._samples, 0.0)

    def _sampled(self, key: str) -> tuple[Array, ...]:
        return tuple(_rows(average.lower()) for average in self._factors[key].averages)

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


def _rows(average: Array) -> Array:
    """Return evenly spaced rows of the lower triangles of a matrix or a stack, float64."""
    width = average.shape[-1]
    rows = average.reshape(-1, width)
    chosen = np.unique(np.linspace(0, len(rows) - 1, _SAMPLED_ROWS).round().astype(int))
    # Entries above the diagonal are not defined; the last row of a symmetric matrix is complete.
    below = np.arange(width) <= chosen[:, None] % average.shape[-2]
    xp = array_module(average)
    sampled: Array = xp.where(xp.asarray(below), rows[xp.asarray(chosen)], 0.0)
    return sampled.astype(np.float64)


def _ratio(change: float, norm: float) -> float:
    """Return the root of a ratio of sums of squares; any change of zero is infinite."""
    if norm > 0:
        return sqrt(change / norm)
    return inf if change > 0 else 0.0
