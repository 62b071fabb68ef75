"""What statistics read of a batch, as arrays of a backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import UnknownNameError
from kfac_engine.factors.statistics import Statistic
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


def outlines(values: Values, backend: Backend) -> dict[str, Array]:
    """Arrays of the shapes and element types of a batch's values that take no memory: one zero."""
    xp = backend.xp
    return {
        name: xp.broadcast_to(xp.zeros((), value.dtype), value.shape)
        for name, value in values.items()
    }


@dataclass(frozen=True, slots=True)
class Extents:
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


def extents(statistics: Sequence[Statistic], values: Values, backend: Backend) -> Extents:
    """What factors must know of a batch before they take it.

    Args:
        statistics: What will be measured.
        values: As made by ``take``.
        backend: Array library.

    Returns:
        The extents of every value that the statistics read.
    """
    names = list(dict.fromkeys(name for found in statistics for name in found.names()))
    norms = backend.squared_norms([values[name] for name in names])
    return Extents(dict(zip(names, norms, strict=True)))
