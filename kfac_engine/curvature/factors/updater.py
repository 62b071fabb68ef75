"""Update of many factors by one batch: either all averages move or none does.

Values are released as soon as every factor that reads them has measured them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from threading import Lock
from typing import TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.tasks import Task
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.measurement import Combine, Measurement
from kfac_engine.curvature.factors.values import tensor_stats
from kfac_engine.errors import InputError

# Receives the names of values that no factor reads any more.
LetGo: TypeAlias = Callable[[Collection[str]], None]
# A factor with a measurement that its average has not received yet.
Measured: TypeAlias = tuple[FisherFactor, Measurement]


@dataclass(frozen=True, slots=True)
class FactorUpdater:
    """Factors that measure the same batch.

    Attributes:
        factors: In the order in which they measure.
        backend: Their array library.
        moving: Names of values that change from source to source.
        examples: Required number of examples; None requires that of the first factor.
        whose: Origin of that number, for messages.
        combine: Combines the measurements of several processes before any average moves; None in
            one process, where measurements are accumulated into the averages directly.
    """

    factors: Sequence[FisherFactor]
    backend: Backend
    moving: Collection[str]
    examples: int | None
    whose: str
    combine: Combine | None = None

    def average(
        self,
        values: dict[str, Array],
        decay: float,
        release: LetGo | None,
        measured: Sequence[Measured] = (),
    ) -> None:
        """Update the averages by a batch of one source.

        Without ``combine``, no copy of a measurement is made.

        Args:
            values: Values that the factors read, by name. Only lengths remain in the mapping.
            decay: Weight of the old averages, in [0, 1].
            release: Receives the names that were deleted from ``values``; may be None.
            measured: Further factors with their measurements of the batch.

        Raises:
            KfacError: The batch does not fit a factor; no average has moved.
        """
        if self.combine is not None:
            names = tuple(values)
            self.average_sum(iter((values,)), decay, measured)
            if release is not None:
                release(names)
            return
        self._check(values)
        readers, lock = self._readers(), Lock()

        def update(factor: FisherFactor) -> None:
            factor.update(values, decay)
            names = tuple(dict.fromkeys(factor.statistic.names()))
            with lock:
                readers.subtract(names)
                unread = [name for name in names if not readers[name]]
                for name in unread:
                    del values[name]
                if release is not None:
                    release(unread)

        self._with_all(update, self.factors, values)
        self._commit(measured, decay)

    def average_sum(
        self,
        sources: Iterator[dict[str, Array]],
        decay: float,
        measured: Sequence[Measured] = (),
    ) -> None:
        """Update the averages by the sum over the sources of a batch.

        Args:
            sources: Values that the factors read, for each source. Each mapping is emptied before
                the next one is requested.
            decay: Weight of the old averages, in [0, 1].
            measured: Further factors with their measurements of the batch.

        Raises:
            KfacError: A source does not fit a factor; no average has moved.
        """
        values = next(sources)
        self._check(values)
        sums: dict[int, Measurement] = {}

        def measure(factor: FisherFactor) -> None:
            sums[id(factor)] = computed(factor, values)

        def add(factor: FisherFactor) -> None:
            sums[id(factor)].add(values)

        self._with_all(measure, self.factors, values)
        values.clear()
        moving = [f for f in self.factors if not set(f.statistic.names()).isdisjoint(self.moving)]
        for values in sources:
            known = tensor_stats([factor.statistic for factor in moving], values, self.backend)
            for factor in moving:
                factor.check(values, known)
            self._with_all(add, moving, values)
            values.clear()
        summed = [(factor, sums[id(factor)]) for factor in self.factors]
        self._commit([*summed, *measured], decay)

    def _commit(self, measured: Sequence[Measured], decay: float) -> None:
        """Combine measurements and update the averages by them."""
        if self.combine is not None:
            self.combine([measurement for _, measurement in measured])
        for factor, measurement in measured:
            factor.commit(measurement, decay)

    def _check(self, values: Values) -> None:
        expected, whose = self.examples, self.whose
        known = tensor_stats([factor.statistic for factor in self.factors], values, self.backend)
        for factor in self.factors:
            factor.check(values, known)
            size = factor.statistic.batch_size(values)
            if expected is None:
                expected, whose = size, f"that of {factor.name}"
            if size != expected:
                raise InputError(
                    f"Batch size {size} for factor {factor.name} did not match value {expected}, "
                    f"{whose}."
                )

    def _readers(self) -> "Counter[str]":
        """Number of factors that read each value; values whose length is read count once more."""
        # Factors that are parts of others read a length that those do not name.
        lengths = {name for factor in self.factors for name in factor.statistic.lengths()}
        read = (dict.fromkeys(factor.statistic.names()) for factor in self.factors)
        return Counter(chain(lengths, *read))

    def _with_all(
        self, do: Callable[[FisherFactor], None], factors: Sequence[FisherFactor], values: Values
    ) -> None:
        """Call a function with each factor, in parallel, the longest measurements first."""
        for factor in factors:
            factor.wait()  # a pending refresh may belong to several factors
        self.backend.run_parallel(
            [Task(_work(factor, values), partial(do, factor)) for factor in factors]
        )


def computed(factor: FisherFactor, values: Values) -> Measurement:
    """Return the measurement of checked values, without a reference to them."""
    measurement = factor.measure(values)
    _ = measurement.array
    return measurement


def _work(factor: FisherFactor, values: Values) -> float:
    """Estimate the multiplications of a measurement: half the products of two features of a row."""
    statistic = factor.statistic
    shape = statistic.shape(values)
    if len(shape) < 2:
        return float(sum(values[name].size for name in statistic.names()))
    return statistic.repeats(values) * statistic.batch_size(values) * prod(shape) / 2
