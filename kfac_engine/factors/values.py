"""What statistics read of a batch, as arrays of a backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.tasks import TO_READ, Task
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
        finite: Whether the sum of squares of a value is finite.
        largest: Largest absolute number of a value that is multiplied before it is squared.
    """

    finite: Mapping[str, bool]
    largest: Mapping[str, float]


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
    finite = dict(zip(names, backend.finite([values[name] for name in names]), strict=True))
    pairs = (pair for found in statistics for pair in found.products())
    multiplied = [n for n in dict.fromkeys(n for pair in pairs for n in pair) if values[n].size]
    found: dict[str, Array] = {}

    def measure(name: str) -> None:
        found[name] = abs(values[name]).max()

    backend.share([Task(TO_READ * values[n].size, partial(measure, n)) for n in multiplied])
    largest = backend.download([found[name] for name in multiplied])
    return Extents(finite, {n: float(x) for n, x in zip(multiplied, largest, strict=True)})
