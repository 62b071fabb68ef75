"""A batch into many factors: all of them move or none does, and values go once they were read."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from threading import Lock
from typing import TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.tasks import Task
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.values import outlines, tensor_stats
from kfac_engine.errors import InputError

# Told the names of values that no factor reads any more.
LetGo: TypeAlias = Callable[[Collection[str]], None]


@dataclass(slots=True)
class Pending:
    """A measurement that is summed up before the factor moves.

    Attributes:
        factor: Stays as it is until ``commit``.
        total: The sum so far.
        shapes: Outlines of the values measured first.
    """

    factor: FisherFactor
    total: Array | None = None
    shapes: Values = field(default_factory=dict)

    def add(self, values: Values) -> None:
        """Add the measurement of these values; refuses what the factor does not fit."""
        self.factor.check(values)
        self.total = self.factor.accumulate(self.total, values)
        self.shapes = self.shapes or outlines(values, self.factor.backend)

    def commit(self, decay: float) -> None:
        """Average the sum in."""
        assert self.total is not None
        self.factor.commit(self.total, self.shapes, decay)


@dataclass(frozen=True, slots=True)
class FactorUpdater:
    """Factors that are to measure the same batch.

    Attributes:
        factors: In the order in which they measure.
        backend: Their array library.
        moving: Names of values that change from source to source; others are the same in all.
        examples: How many there must be; None for as many as the first factor finds.
        whose: Who says so, for messages.
    """

    factors: Sequence[FisherFactor]
    backend: Backend
    moving: Collection[str]
    examples: int | None
    whose: str

    def average(self, values: dict[str, Array], decay: float, release: LetGo | None) -> None:
        """Average a batch of one source in, without a copy of its measurements.

        Args:
            values: What the factors read, by name; is empty afterwards but for lengths.
            decay: Of the old averages, in [0, 1].
            release: Told which values were deleted from ``values``; may be None.

        Raises:
            KfacError: The batch does not fit a factor; none has moved.
        """
        self._check(values)
        readers, lock = self._readers(), Lock()

        def measure(factor: FisherFactor) -> None:
            factor.update(values, decay)
            names = tuple(dict.fromkeys(factor.statistic.names()))
            with lock:
                readers.subtract(names)
                unread = [name for name in names if not readers[name]]
                for name in unread:
                    del values[name]
                if release is not None:
                    release(unread)

        self._with_all(measure, self.factors, values)

    def average_sum(self, sources: Iterator[dict[str, Array]], decay: float) -> None:
        """Average the sum of the sources of a batch in; one is held at a time.

        Args:
            sources: What the factors read of each; emptied before the next one is asked for.
            decay: Of the old averages, in [0, 1].

        Raises:
            KfacError: A source does not fit a factor; none has moved.
        """
        values = next(sources)
        self._check(values)
        sums: dict[int, Array] = {}

        def add(factor: FisherFactor) -> None:
            sums[id(factor)] = factor.accumulate(sums.get(id(factor)), values)

        self._with_all(add, self.factors, values)
        shapes = outlines(values, self.backend)
        values.clear()
        moving = [f for f in self.factors if not set(f.statistic.names()).isdisjoint(self.moving)]
        for values in sources:
            known = tensor_stats([factor.statistic for factor in moving], values, self.backend)
            for factor in moving:
                factor.check(values, known)
            self._with_all(add, moving, values)
            values.clear()
        for factor in self.factors:
            factor.commit(sums.pop(id(factor)), shapes, decay)

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
        """How many factors read each value; one more where a length is asked for as well."""
        # Factors that are parts of others read a length that those do not name.
        lengths = {name for factor in self.factors for name in factor.statistic.lengths()}
        read = (dict.fromkeys(factor.statistic.names()) for factor in self.factors)
        return Counter(chain(lengths, *read))

    def _with_all(
        self, do: Callable[[FisherFactor], None], factors: Sequence[FisherFactor], values: Values
    ) -> None:
        """Do the same with all factors, side by side, what takes long first."""
        for factor in factors:
            factor.wait()  # what it was waiting for may be another's as well
        self.backend.share([Task(_work(factor, values), partial(do, factor)) for factor in factors])


def _work(factor: FisherFactor, values: Values) -> float:
    """Multiplications of a measurement, about: half of all products of two features of a row."""
    statistic = factor.statistic
    shape = statistic.shape(values)
    if len(shape) < 2:
        return float(sum(values[name].size for name in statistic.names()))
    return statistic.repeats(values) * statistic.batch_size(values) * prod(shape) / 2
