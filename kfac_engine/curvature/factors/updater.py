"""Update of many factors by one batch: either all averages move or none does.

Values are released as soon as every factor that reads them has measured them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Lock
from typing import TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.threads import Task
from kfac_engine.curvature.factors.base import (
    Combine,
    FisherFactor,
    Measurement,
    computed,
    multiplications,
    tensor_stats,
)
from kfac_engine.curvature.factors.eigenbasis import EigenbasisFactor, set_bases, without_basis
from kfac_engine.curvature.factors.statistics import Sizes, rows_name
from kfac_engine.errors import InputError

# Receives the names of values that no factor reads any more.
LetGo: TypeAlias = Callable[[Collection[str]], None]
# A factor with a measurement that its average has not received yet.
Measured: TypeAlias = tuple[FisherFactor, Measurement]


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update by a checked batch, which no average has received yet.

    Attributes:
        measured: Factors with their measurements.
        move: Measures the other factors into their averages; called with decay and weight.
        release: Called after deferred measurements have entered their averages.
    """

    measured: Sequence[Measured]
    move: Callable[[float, float], None] | None = None
    release: Callable[[], None] | None = None

    def without(self, factors: Collection[FisherFactor]) -> "PendingUpdate":
        """Return the update, whose measurements of some factors do not count."""
        for factor, measurement in self.measured:
            measurement.counts = factor not in factors
        return self

    def commit(self, decay: float, weight: float = 1.0) -> None:
        """Update the averages by a batch with a weight; the update cannot be used again.

        ``decay`` is the weight of the old averages, in [0, 1].
        """
        if self.move is not None:
            self.move(decay, weight)
        for factor, measurement in self.measured:
            factor.commit(measurement, decay, weight)
        if self.release is not None:
            self.release()


class PartSums:
    """The measurements of the parts of a batch, joined to one measurement of the batch.

    The mean over a batch is the mean over its parts, each with the weight of its examples, or of
    its rows for a mean over rows. Each of several processes joins its examples of every part.
    """

    def __init__(self) -> None:
        self._totals: dict[int, Measured] = {}
        self._weights: dict[int, float] = {}
        self._repeats: dict[int, float] = {}
        self._examples = self._whole = 0  # of all processes, with the present part and in it
        self._lock = Lock()

    def begin(self, whole: int) -> None:
        """Begin the next part, of which all processes together have ``whole`` examples."""
        self._whole = whole
        self._examples += whole

    def add(self, factor: FisherFactor, measurement: Measurement) -> None:
        """Add the measurement of a factor on the present part, and empty the measurement."""
        key, before = id(factor), self._weights.get(id(factor), 0.0)
        over_rows = factor.statistic.over_rows
        weight = measurement.examples * (measurement.repeats if over_rows else 1)
        total = before + weight
        shrunk, share = (before / total, weight / total) if total else (1.0, 0.0)
        repeats = self._repeats.get(key, 0.0) + self._whole * measurement.repeats
        if key in self._totals:
            joined = self._totals[key][1]
            joined.join(measurement, shrunk, share)
        else:
            joined = computed(measurement)
        joined.repeats, joined.batch = repeats / self._examples, self._examples
        # The share of this process in that of several is its share in the weights.
        joined.examples, joined.weighted = total / (joined.repeats if over_rows else 1), True
        with self._lock:
            self._totals[key] = factor, joined
            self._weights[key], self._repeats[key] = total, repeats

    def update(self, factors: Sequence[FisherFactor]) -> PendingUpdate:
        """Return the update by the batch, with measurements in the order of the factors."""
        return PendingUpdate([self._totals[id(factor)] for factor in factors])


class FactorUpdater:
    """Factors that measure the same batches.

    Args:
        factors: In the order in which they measure.
        backend: Their array library.
        moving: Names of values that change from source to source.
        examples: Required number of examples; None requires the number of the first factor.
        whose: Origin of that number, for messages.
        combine: See the attribute.

    Attributes:
        factors: The factors.
        combine: Combines the measurements of several processes before any average moves; None in
            one process, where measurements are accumulated into the averages directly.
        linear: Factors whose averages are combined instead of their measurements. With ``combine``,
            measurements of one source are deferred for these factors only.
    """

    def __init__(
        self,
        factors: Sequence[FisherFactor],
        backend: Backend,
        moving: Collection[str],
        examples: int | None,
        whose: str,
        combine: Combine | None = None,
    ) -> None:
        self.combine = combine
        self.factors = tuple(factors)
        self.linear: Collection[FisherFactor] = ()
        self._backend = backend
        self._examples, self._whose = examples, whose
        # Names of the values that each factor measures; they never change.
        self._names = [tuple(dict.fromkeys(f.statistic.names())) for f in self.factors]
        self._moving_names = moving
        self._moving = [
            factor
            for factor, names in zip(self.factors, self._names, strict=True)
            if not set(names).isdisjoint(moving)
        ]
        self._all_names = tuple(dict.fromkeys(chain(*self._names)))
        self._bases = [f for f in self.factors if isinstance(f, EigenbasisFactor)]
        # Factors that are parts of others read a length that those do not name.
        self._lengths = {name for f in self.factors for name in f.statistic.lengths()}
        self._readers = Counter(chain(self._lengths, *self._names))

    def measure(
        self,
        values: dict[str, Array],
        release: LetGo | None,
        measured: Sequence[Measured] = (),
        left_out: Collection[FisherFactor] = (),
    ) -> PendingUpdate:
        """Check a batch of one source, and measure it if ``combine`` is set; no average changes.

        Without ``combine``, and for ``linear`` factors, the measurement takes place when the update
        is committed, directly into averages. Only lengths remain in ``values``; ``release``
        receives the names that were deleted. ``measured`` are further factors with their
        measurements of the batch. The averages of ``left_out`` do not change. A ``KfacError`` is
        raised if the batch does not fit a factor.
        """
        checked = self._check(values)
        if self._bases:
            set_bases(self._bases, [values], self.combine)
        if self.combine is None:
            move = partial(self._move, values, checked, release, left_out)
            return PendingUpdate(measured, move).without(left_out)
        pairs = self._measured(values, checked, self.linear)
        deferred = [factor.statistic for factor, measurement in pairs if measurement.deferred]
        read = {name for s in deferred for name in (*s.names(), *s.lengths())}
        read |= {rows_name(name) for name in read}
        # Lengths may be read after the update: without them, a trace computes them again.
        names = [name for name in values if name not in self._lengths]
        unread = [name for name in names if name not in read]
        for name in unread:
            del values[name]
        if release is None:
            return PendingUpdate([*pairs, *measured]).without(left_out)
        release(unread)
        later = [name for name in names if name in read]
        update = PendingUpdate([*pairs, *measured], release=partial(release, later))
        return update.without(left_out)

    def add_part(self, values: dict[str, Array], sums: PartSums) -> None:
        """Measure a part of a batch of one source into ``sums``; no average changes.

        A ``KfacError`` is raised if the part does not fit a factor.
        """
        checked = self._check(values)

        def measure(index: int) -> None:
            factor = self.factors[index]
            sums.add(factor, factor.measure(values, checked[index], combined=True))

        self._with_all(measure, checked, values)

    @property
    def parts_of_bases(self) -> tuple[FisherFactor, ...]:
        """The factors that ``prepare`` measures; none unless this is the first batch of EKFAC."""
        new = without_basis(self.factors)
        return tuple(dict.fromkeys(part for factor in new for part in factor.kronecker_factors))

    def prepare(self, sources: Iterator[dict[str, Array]]) -> None:
        """Set the first bases of EKFAC from the sum over the sources of a batch.

        ``sources`` has the values that ``parts_of_bases`` read, for each source. Each mapping is
        emptied before the next one is requested. A ``KfacError`` is raised if a source does not fit
        a factor; then no average has moved.
        """

        def emptied() -> Iterator[dict[str, Array]]:
            for values in sources:
                yield values
                values.clear()

        set_bases(self.factors, emptied(), self.combine, self._moving_names)

    def measure_sum(
        self,
        sources: Iterator[dict[str, Array]],
        measured: Sequence[Measured] = (),
        *,
        part: bool = False,
    ) -> PendingUpdate:
        """Measure the sum over the sources of a batch; no average changes.

        ``sources`` have the values that the factors read. Each mapping is emptied before the next
        one is requested. If ``parts_of_bases`` is not empty, call ``prepare`` before. ``part`` says
        whether the batch is a part of another one.
        """
        values = next(sources)
        pairs = self._measured(values, self._check(values), part=part)
        sums = {id(factor): measurement for factor, measurement in pairs}
        values.clear()
        for values in sources:
            self._add_source(sums, values)
            values.clear()
        return PendingUpdate([*pairs, *measured])

    def _measured(
        self,
        values: Values,
        checked: Sequence[Sizes],
        deferred: Collection[FisherFactor] = (),
        *,
        part: bool = False,
    ) -> list[Measured]:
        """Measure a checked batch for all factors; leave out the arrays of some of them."""
        combined = part or self.combine is not None
        measurements: dict[int, Measurement] = {}

        def measure(index: int) -> None:
            factor = self.factors[index]
            measurement = factor.measure(values, checked[index], combined=combined)
            measurements[index] = measurement if factor in deferred else computed(measurement)

        self._with_all(measure, checked, values)
        return [(factor, measurements[index]) for index, factor in enumerate(self.factors)]

    def combined(self, update: PendingUpdate) -> PendingUpdate:
        """Combine the measurements of an update with other processes, in place."""
        if self.combine is not None:
            self.combine([measurement for _, measurement in update.measured])
        return update

    def _move(
        self,
        values: dict[str, Array],
        checked: Sequence[Sizes],
        release: LetGo | None,
        left_out: Collection[FisherFactor],
        decay: float,
        weight: float,
    ) -> None:
        """Measure a checked batch of one source directly into the averages."""
        readers, lock = dict(self._readers), Lock()

        def update(index: int) -> None:
            factor, names = self.factors[index], self._names[index]
            measurement = factor.measure(values, checked[index])
            measurement.counts = factor not in left_out
            factor.commit(measurement, decay, weight)
            unread = []
            with lock:
                for name in names:
                    readers[name] -= 1
                    if not readers[name]:
                        del values[name]
                        unread.append(name)
                if release is not None:
                    release(unread)

        self._with_all(update, checked, values)

    def _add_source(self, sums: dict[int, Measurement], values: dict[str, Array]) -> None:
        """Add a further source of a batch to the measurements that it changes."""
        names = dict.fromkeys(name for f in self._moving for name in f.statistic.names())
        known = tensor_stats(tuple(names), values, self._backend)
        sizes = [factor.check(values, known) for factor in self._moving]
        self._backend.run_parallel(
            [
                Task(multiplications(factor, size, values), partial(sums[id(factor)].add, values))
                for factor, size in zip(self._moving, sizes, strict=True)
            ]
        )

    def _check(self, values: Values) -> list[Sizes]:
        """Check a batch for all factors; return the sizes of their measurements."""
        expected, whose = self._examples, self._whose
        known = tensor_stats(self._all_names, values, self._backend)
        checked = []
        for factor in self.factors:
            sizes = factor.check(values, known)
            if expected is None:
                expected = sizes.examples
            if sizes.examples != expected:
                whose = whose if self._examples else f"that of {self.factors[0].name}"
                raise InputError(
                    f"Batch size {sizes.examples} for factor {factor.name} did not match value "
                    f"{expected}, {whose}."
                )
            checked.append(sizes)
        return checked

    def _with_all(
        self, do: Callable[[int], None], checked: Sequence[Sizes], values: Values
    ) -> None:
        """Call a function with the index of each factor, in parallel, the longest work first."""
        for factor in self.factors:
            factor.wait()  # a pending refresh may belong to several factors
        self._backend.run_parallel(
            [
                Task(multiplications(factor, sizes, values), partial(do, index))
                for index, (factor, sizes) in enumerate(zip(self.factors, checked, strict=True))
            ]
        )
