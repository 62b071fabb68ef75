"""Combines measurements: the means of a statistic over a batch, with their counts.

Parts of a batch, and shards of several processes, are joined by one rule: the counts add up, and
the mean of the whole is the mean of the parts, each with the weight of its count.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeAlias, TypeVar

import numpy as np

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Count, Sizes, Statistic

# Receives the names of values that no factor reads any more.
LetGo: TypeAlias = Callable[[Collection[str]], None]


def type_of_mean(values: Values, names: Iterable[str]) -> DType:
    """Return the element type of a mean over values; integers do not determine it."""
    types = (values[name].dtype for name in names)
    return np.result_type(np.float32, *(dtype for dtype in types if dtype.kind == "f"))


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The mean of a statistic over a batch, or over a part of it."""

    array: Array  # the mean, which belongs to this measurement
    count: Count  # what the array is a mean over
    # Shape of the statistic, if the array has sums that the statistic squares.
    squared: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the statistic."""
        return tuple(self.array.shape) if self.squared is None else self.squared

    @property
    def dtype(self) -> DType:
        """Element type of the array."""
        dtype: DType = self.array.dtype
        return dtype

    def enter(
        self, average: Array, statistic: Statistic, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Compute ``average ← beta·average + alpha·measurement``; the array is overwritten."""
        if self.squared is not None:
            examples = self.count.examples
            statistic.add_sums(average, self.array, examples, backend, alpha, beta)
            return
        array = self.array
        average *= beta
        array *= alpha
        average += array

    def share(self, part: float, total: Count, least: DType) -> "Measurement":
        """Return ``part`` times the mean, at least as exact as a type; the array is reused."""
        array = self.array.astype(np.result_type(self.array.dtype, least), copy=False)
        array *= part
        return replace(self, array=array, count=total)


@dataclass(frozen=True, slots=True, eq=False)
class ToMeasure:
    """A checked batch that a factor measures straight into its average, without a second matrix."""

    values: Values  # the values of the batch
    sizes: Sizes  # result of ``FisherFactor.check``
    count: Count  # count of the whole batch
    names: tuple[str, ...]  # names of the values that the statistic reads
    part: float = 1.0  # share of these values in the whole batch

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the statistic."""
        return self.sizes.shape

    @property
    def dtype(self) -> DType:
        """Element type of the measurement, without regard to its factor."""
        return type_of_mean(self.values, self.names)

    def enter(
        self, average: Array, statistic: Statistic, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Measure the batch into ``average ← beta·average + alpha·measurement``, in place."""
        statistic.add_to(average, self.values, backend, alpha * self.part, beta)

    def share(self, part: float, total: Count, least: DType) -> "ToMeasure":
        """Return a batch whose measurement is ``part`` times the mean."""
        del least  # the average has it
        return replace(self, count=total, part=part)


Part = TypeVar("Part", Measurement, ToMeasure)


class UnreadValues:
    """The values of a batch, each held until its last reader has measured it.

    Args:
        values: Values by name; names leave it.
        readers: Number of readers of each value.
        release: Receives the names that leave.
    """

    def __init__(
        self, values: dict[str, Array], readers: Mapping[str, int], release: LetGo | None
    ) -> None:
        self._values, self._readers, self._release = values, dict(readers), release
        self._lock = Lock()

    def read(self, names: Iterable[str]) -> None:
        """Record that a reader of some values has measured them."""
        unread = []
        with self._lock:
            for name in dict.fromkeys(names):
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._values[name]
                    unread.append(name)
            if self._release is not None:
                self._release(unread)
