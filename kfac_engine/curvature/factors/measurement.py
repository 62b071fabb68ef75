"""The values of a batch, and their measurement before an average receives it.

An update has three steps: a factor measures a batch, the measurements of several processes are
combined, and the average moves (``FisherFactor.measure``, ``Combine``, ``FisherFactor.commit``).
A measurement is deferred until its array is needed. A deferred measurement is accumulated directly
into the average, so that an update in one process allocates no second matrix.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import KroneckerMoment, Sizes, Statistic
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.losses.checks import Named


def take(values: Named, names: Iterable[str], backend: Backend) -> dict[str, Array]:
    """Return values of a batch as arrays of the backend, which are views where possible.

    ``UnknownNameError`` is raised if a value is missing.
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
    """Raise ``InputError`` if a batch has different numbers of examples for different factors.

    ``updated`` is the name and the statistic of the factor that is updated. It is compared with the
    first of ``others`` whose values are all in the batch.
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

    A sum of squares is not finite if it overflows the type of its value.
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


def tensor_stats(names: Sequence[str], values: Values, backend: Backend) -> TensorStats:
    """Return the norms of values of a batch, where ``values`` is the result of ``take``."""
    norms = backend.squared_norms([values[name] for name in names])
    return TensorStats(dict(zip(names, norms, strict=True)))


@runtime_checkable
class SquareOfSums(Protocol):
    """A statistic that is a square of sums over a batch: sums over parts of it can be added."""

    def sums(self, values: Values, dtype: DType, backend: Backend) -> Array:
        """Return the sums divided by the number of examples, ``(sources, …)``."""

    def add_sums(
        self, out: Array, sums: Array, examples: int, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·measurement`` from the sums, in place."""


def multiplications(factor: "Measurable", sizes: Sizes, values: Values) -> float:
    """Estimate the multiplications of a measurement: half the products of two features of a row."""
    if len(sizes.shape) < 2:
        return float(sum(values[name].size for name in factor.statistic.names()))
    return sizes.repeats * sizes.examples * prod(sizes.shape) / 2


class Measurable(Protocol):
    """The part of a factor that a measurement reads; see ``FisherFactor``."""

    statistic: Statistic
    backend: Backend
    narrowest: DType


class Measurement:
    """A statistic of one batch: the sum over its sources of means over its examples.

    Args:
        factor: The factor that measures.
        values: Checked values of the first source. A deferred measurement refers to them.
        sizes: Result of ``FisherFactor.check``.
        combined: Whether the measurement is combined with other parts of the batch. The array of a
            ``SquareOfSums`` then holds its sums.

    Attributes:
        factor: The factor that measures.
        examples: Number of examples of the batch, or sum of the weights of its rows for each
            repeat: the weight of the measurement in a mean over processes.
        repeats: Uses × positions for each example, or its mean over the parts of a batch.
        weighted: Whether ``examples`` is a sum of weights.
        batch: Number of examples of the whole batch, those that do not count too; None if the
            measurement is not combined.
    """

    def __init__(
        self, factor: Measurable, values: Values, sizes: Sizes, *, combined: bool = False
    ) -> None:
        statistic = factor.statistic
        # Integers are token ids or counts: they do not determine the precision of the statistic.
        types = [values[name].dtype for name in statistic.names()]
        self.factor = factor
        counted = (
            statistic.counted(values, sizes) if isinstance(statistic, KroneckerMoment) else None
        )
        self.examples: float = sizes.examples if counted is None else counted
        self.weighted = counted is not None
        self.repeats: float = sizes.repeats
        self._sizes, self._shape = sizes, sizes.shape
        self.batch: int | None = None
        self._dtypes = [dtype for dtype in types if dtype.kind == "f"]
        self._square = statistic if combined and isinstance(statistic, SquareOfSums) else None
        self._values: Values | None = values
        self._array: Array | None = None
        self._share = 1.0

    @property
    def rows(self) -> float:
        """Rows for each example of the batch that count, with their weights."""
        batch = self._sizes.examples if self.batch is None else self.batch
        return self.repeats * self.examples / batch if self.weighted else self.repeats

    @property
    def deferred(self) -> bool:
        """Whether the array is not computed yet."""
        return self._array is None

    @property
    def array(self) -> Array:
        """The measurement as an array, which may be changed in place.

        The first access computes the array and releases the values.
        """
        if self._array is None:
            assert self._values is not None, "a measurement enters one average"
            values, self._values = self._values, None
            if self._square is not None:
                self._array = self._square.sums(values, self._dtype, self.factor.backend)
            else:
                self._array = self.zeros()
                self._accumulate(self._array, values, self._share, 0.0)
        return self._array

    def add(self, values: Values) -> None:
        """Add checked values of a further source of the batch; no reference to them remains."""
        array = self.widened(self.array)
        if self._square is not None:
            backend = self.factor.backend
            sums = self._square.sums(values, array.dtype, backend)
            array = backend.xp.concatenate([array, sums])
        else:
            self._accumulate(array, values, 1.0, 1.0)
        self._array = array

    def add_to(self, average: Array, alpha: float, beta: float) -> None:
        """Compute ``average ← beta·average + alpha·measurement`` in place.

        The measurement is empty afterwards.
        """
        if self._array is None:
            assert self._values is not None, "a measurement enters one average"
            self._accumulate(average, self._values, alpha * self._share, beta)
            self._values = None
            return
        if self._square is not None:
            backend, sums = self.factor.backend, self._array
            self._square.add_sums(average, sums, int(self.examples), backend, alpha, beta)
        else:
            average *= beta
            self._array *= alpha
            average += self._array
        self._array = None

    def weigh(self, share: float) -> None:
        """Multiply the measurement by a number; a deferred one remains deferred."""
        if self._array is None and self._square is None:
            self._share *= share
        else:
            array = self.array
            array *= share

    def join(self, other: "Measurement", factor: float, share: float) -> None:
        """Compute ``array ← factor·array + share·other`` for the same statistic of another part.

        The other measurement is empty afterwards.
        """
        array = self.array
        array = array.astype(np.result_type(array.dtype, other.dtype), copy=False)
        if self._square is None:
            other.add_to(array, share, factor)
        else:  # the sums of a square
            array *= factor
            array += share * other.array
        self._array = array

    @property
    def dtype(self) -> DType:
        """Element type of the array."""
        return self._dtype if self._array is None else self._array.dtype

    @property
    def work(self) -> float:
        """Estimated number of multiplications of a deferred measurement."""
        return (
            0.0 if self._values is None else multiplications(self.factor, self._sizes, self._values)
        )

    def widen(self) -> None:
        """Convert the array to the least exact type that the factor allows."""
        if self._array is not None:
            self._array = self.widened(self._array)

    def zeros(self) -> Array:
        """Return a new array of zeros with the measurement's shape and element type."""
        # Entries that statistics do not write (an upper triangle) are scaled and added as well.
        array: Array = self.factor.backend.xp.zeros(self._shape, self._dtype)
        return array

    def widened(self, array: Array) -> Array:
        """Return ``array`` in the least exact type that the factor allows, or in its own."""
        dtype = np.result_type(array.dtype, self.factor.narrowest)
        return array.astype(dtype, copy=False)

    @property
    def _dtype(self) -> DType:
        return np.result_type(self.factor.narrowest, *self._dtypes)

    def _accumulate(self, out: Array, values: Values, alpha: float, beta: float) -> None:
        self.factor.statistic.add_to(out, values, self.factor.backend, alpha, beta)


def computed(measurement: Measurement) -> Measurement:
    """Return a measurement after it has read its values, without a reference to them."""
    _ = measurement.array
    return measurement


# Replaces the array of each measurement, in place, by its mean over all processes, weighted by the
# number of examples, and ``examples`` by the sum over all processes. Called with the measurements
# in the same order on all processes: once for each update, and before the first update also once
# with the factors of all bases of EKFAC. An error leaves all averages unchanged.
#
# The result is the measurement of the joined batches. A ``SampledMoment`` needs the rows of each
# process; without them, each process draws from its own part, so that the mean estimates the same
# statistic from other draws.
Combine: TypeAlias = Callable[[Sequence[Measurement]], None]
