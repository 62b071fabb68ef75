"""Lists the refreshes of all factors with their costs, owners and least periods."""

from collections.abc import Callable, Mapping, Sequence
from math import inf, isinf, prod
from typing import Any

import numpy as np

from kfac_engine.backend.namespace import is_recorded, recordable
from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import Division
from kfac_engine.curvature.schedule import Work

# Largest share of the refreshes in the operations of the steps while periods grow.
_EARLY_SHARE = 0.2
# Operations in single precision that take the time of one in double precision, as of an inverse.
_DOUBLE = 2
# Number of operations of a refresh that takes milliseconds.
_CHEAP = 1e9


def works(
    collection: LayerCollection, factors: Mapping[str, FisherFactor], division: Division
) -> tuple[Work, ...]:
    """Return the refresh of each factor with its cost, by key; the shapes must be known."""
    shapes = refreshed_shapes(collection)
    costs = {key: sum(map(refresh_cost, shapes[id(f)])) for key, f in factors.items()}
    owners, ranks = division.owners(factors), division.ranks
    return tuple(Work(key, costs[key], owners.get(key), ranks) for key in factors)


def are_cheap(works: Sequence[Work]) -> bool:
    """Return whether the refresh of all factors takes milliseconds, so that it may come often."""
    return sum(work.cost for work in works) < _CHEAP


def early_rates(
    collection: LayerCollection,
    works: Sequence[Work],
    repeats: Callable[[FisherBlock], float] | None = None,
) -> tuple[float, float]:
    """Return two rates, from which ``least_period`` computes the least period of refreshes.

    The reciprocal of the period is the first rate times the number of examples of a batch, plus
    the second rate. With this period, refreshes of all factors are at most 20 % of the
    operations. Both rates are infinite if a refresh takes milliseconds. They follow from sizes,
    so that periods are the same in each run and on each process.

    ``repeats`` returns the number of rows of each example in the factors of a block, which is
    measured by default.
    """
    if are_cheap(works):
        return inf, inf
    refresh = sum(work.cost for work in works) * _DOUBLE * (1 / _EARLY_SHARE - 1)
    measured = lambda block: max(factor.repeats or 1.0 for factor in block.factors)  # noqa: E731
    rows_of = repeats or measured
    passes = products = 0.0
    for key, block in collection.fisher_blocks.items():
        shapes = [collection.require_shape(name) for name in uses(key)]
        numbers = sum(map(prod, shapes))
        # A product of the forward pass, and two of the backward pass; token ids select rows.
        if not block.selects_rows:
            passes += 3 * numbers * rows_of(block)
        sides = block.factor_shapes(shapes)
        products += numbers * sum(shape[-1] for shape in sides if len(shape) > 1)
    return passes / refresh, products / refresh


@recordable
def least_period(rates: tuple[Any, Any], examples: Any) -> Any:
    """Return the least number of steps between two refreshes, for ``early_rates``.

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
