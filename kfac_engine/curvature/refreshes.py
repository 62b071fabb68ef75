"""The refreshes of all factors of a collection: their keys, costs and owners."""

from collections.abc import Callable, Iterable
from functools import cached_property
from math import prod

from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.refresh import begin_refresh
from kfac_engine.curvature.schedule import Work


class Refreshes:
    """Refreshes of the factors that store inverses or powers, by key.

    The key of a factor is its position in ``collection.get_factors()``, as text.

    Args:
        collection: The registered layers; their factors are instantiated.
    """

    def __init__(self, collection: LayerCollection) -> None:
        self._collection = collection

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Every refresh with its cost, for ``schedule.plan``; the shapes must be known."""
        shapes = factor_shapes(self._collection)
        return tuple(
            Work(key, refresh_cost(shapes[id(factor)])) for key, factor in self._factors.items()
        )

    def begin(self, keys: Iterable[str] | None = None) -> Callable[[], None]:
        """Begin refreshes; see ``factors.refresh.begin_refresh``.

        Args:
            keys: Keys of works; None for all.

        Returns:
            A function that waits for the results and stores them.

        Raises:
            NotReadyError: A factor has no average yet.
            NonFiniteError: An average holds NaN or infinity.
        """
        factors = [self._factors[key] for key in (self._factors if keys is None else keys)]
        return begin_refresh(factors, self._collection.backend)

    @cached_property
    def _factors(self) -> dict[str, FisherFactor]:
        factors = enumerate(self._collection.get_factors())
        return {str(index): factor for index, factor in factors if factor.has_inverses}


def factor_shapes(collection: LayerCollection) -> dict[int, tuple[int, ...]]:
    """Return the shape of the average of each factor, which is known before any batch.

    Args:
        collection: The registered layers, with the shapes of their parameters.

    Returns:
        ``id`` of a factor to the shape of its average.
    """
    shapes: dict[int, tuple[int, ...]] = {}
    for key, block in collection.fisher_blocks.items():
        averages = block.factor_shapes([collection.require_shape(name) for name in uses(key)])
        shapes |= {id(f): shape for f, shape in zip(block.factors, averages, strict=True)}
    return shapes


def refresh_cost(shape: tuple[int, ...]) -> float:
    """Return the number of multiplications of a refresh.

    Args:
        shape: Shape of the average: ``(d, d)``, or ``(m, d, d)`` for a stack of ``m`` matrices.

    Returns:
        ``d³`` for each matrix.
    """
    return float(prod(shape)) * (shape[-1] if shape else 1)
