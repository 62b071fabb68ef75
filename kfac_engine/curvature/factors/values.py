"""What statistics read of a batch, as arrays of a backend."""

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
    """Some values of a batch, as arrays of the backend.

    Args:
        values: Value name to array, of any library.
        names: Which.
        backend: Array library.

    Returns:
        Name to array; the caller's own memory where possible.

    Raises:
        UnknownNameError: A value is missing.
    """
    found: dict[str, Array] = {}
    for name in names:
        try:
            found[name] = backend.asarray(values[name])
        except KeyError as missing:
            raise UnknownNameError(
                f"the statistics read '{name}', but the batch has no value of that name."
            ) from missing
    return found


def check_examples(
    own: tuple[str, Statistic],
    others: Iterable[tuple[str, Statistic]],
    values: Values,
    backend: Backend,
) -> None:
    """Refuse a batch whose values hold different numbers of examples for different factors.

    Args:
        own: Name and statistic of the factor that takes the batch.
        others: Those of other factors; the first one that the batch has all values of is compared.
        values: Value name to array, of any library.
        backend: Array library.

    Raises:
        InputError: The numbers differ.
    """
    expected = _examples(own[1], values, backend)
    for name, statistic in others:
        found = _examples(statistic, values, backend)
        if found is not None and found != expected:
            raise InputError(
                f"{own[0]} reads {expected} examples, but {name} reads {found}; give both the "
                f"values of one batch."
            )
        if found is not None:
            return


def _examples(statistic: Statistic, values: Values, backend: Backend) -> int | None:
    """Number of examples, from shapes alone; None where values that determine it are missing."""
    names = statistic.names()
    read = {name: values[name] for name in (*names, *statistic.lengths()) if name in values}
    arrays = {n: v if hasattr(v, "shape") else backend.asarray(v) for n, v in read.items()}
    drawn = {n: np.broadcast_to(np.zeros(()), tuple(a.shape)) for n, a in arrays.items()}
    if not drawn.keys() >= set(names):
        return None
    try:
        return statistic.batch_size(drawn)
    except UnknownNameError:
        return None


@dataclass(frozen=True, slots=True)
class TensorStats:
    """How large the numbers of a batch are, read from a device once for all factors.

    Attributes:
        squared_norms: Sum of squares of each value; not finite where that overflows its type.
    """

    squared_norms: Mapping[str, float]

    def is_finite(self, name: str) -> bool:
        """Whether the sum of squares of a value is finite."""
        return isfinite(self.squared_norms[name])

    def norm_bound(self, name: str, x: Array) -> float:
        """What the norm of a value ``x`` is at most, with a one beside each of its numbers."""
        if self.is_finite(name):
            return sqrt(self.squared_norms[name] + x.size)
        return (float(abs(x).max()) + 1.0) * sqrt(x.size)


def tensor_stats(statistics: Sequence[Statistic], values: Values, backend: Backend) -> TensorStats:
    """What factors must know of a batch before they take it.

    Args:
        statistics: What will be measured.
        values: As made by ``take``.
        backend: Array library.

    Returns:
        The tensor_stats of every value that the statistics read.
    """
    names = list(dict.fromkeys(name for found in statistics for name in found.names()))
    norms = backend.squared_norms([values[name] for name in names])
    return TensorStats(dict(zip(names, norms, strict=True)))
