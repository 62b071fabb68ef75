"""The values of a batch that statistics read, as arrays of a backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Statistic
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.losses.checks import Named


def take(values: Named, names: Iterable[str], backend: Backend) -> dict[str, Array]:
    """Return values of a batch as arrays of the backend.

    Args:
        values: Value name to array, of any library.
        names: Names of the values.
        backend: Array library.

    Returns:
        Name to array; a view of the caller's memory where possible.

    Raises:
        UnknownNameError: A value is missing.
    """
    arrays: dict[str, Array] = {}
    for name in names:
        try:
            arrays[name] = backend.asarray(values[name])
        except KeyError as missing:
            raise UnknownNameError(
                f"the statistics read '{name}', but the batch has no value of that name."
            ) from missing
    return arrays


def check_examples(
    updated: tuple[str, Statistic],
    others: Iterable[tuple[str, Statistic]],
    values: Values,
    backend: Backend,
) -> None:
    """Check that a batch has the same number of examples for different factors.

    Args:
        updated: Name and statistic of the factor that is updated.
        others: Names and statistics of other factors. The first factor whose values are all in
            the batch is compared.
        values: Value name to array, of any library.
        backend: Array library.

    Raises:
        InputError: The numbers differ.
    """
    expected = _examples(updated[1], values, backend)
    for name, statistic in others:
        examples = _examples(statistic, values, backend)
        if examples is not None and examples != expected:
            raise InputError(
                f"{updated[0]} reads {expected} examples, but {name} reads {examples}; give both "
                f"the values of one batch."
            )
        if examples is not None:
            return


def _examples(statistic: Statistic, values: Values, backend: Backend) -> int | None:
    """Return the number of examples; None if values that determine it are missing."""
    names = statistic.names()
    values = {name: values[name] for name in (*names, *statistic.lengths()) if name in values}
    arrays = {n: v if hasattr(v, "shape") else backend.asarray(v) for n, v in values.items()}
    shapes = {n: np.broadcast_to(np.zeros(()), tuple(a.shape)) for n, a in arrays.items()}
    if not shapes.keys() >= set(names):
        return None
    try:
        return statistic.batch_size(shapes)
    except UnknownNameError:
        return None


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Norms of the values of a batch, computed once for all factors.

    Attributes:
        squared_norms: Sum of squares of each value; not finite if it overflows its type.
    """

    squared_norms: Mapping[str, float]

    def is_finite(self, name: str) -> bool:
        """Whether the sum of squares of a value is finite."""
        return isfinite(self.squared_norms[name])

    def norm_bound(self, name: str, x: Array) -> float:
        """Return an upper bound of the norm of ``x`` with a one appended to each entry."""
        if self.is_finite(name):
            return sqrt(self.squared_norms[name] + x.size)
        return (float(abs(x).max()) + 1.0) * sqrt(x.size)


def tensor_stats(statistics: Sequence[Statistic], values: Values, backend: Backend) -> TensorStats:
    """Compute the norms of the values that statistics read.

    Args:
        statistics: Statistics that will be measured.
        values: Result of ``take``.
        backend: Array library.

    Returns:
        Norms of every value that the statistics read.
    """
    names = list(dict.fromkeys(name for statistic in statistics for name in statistic.names()))
    norms = backend.squared_norms([values[name] for name in names])
    return TensorStats(dict(zip(names, norms, strict=True)))
