"""Measures batches for several factors, into new arrays or directly into the averages.

Values are released as soon as every factor that reads them has measured them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.threads import Task
from kfac_engine.curvature.factors.base import FisherFactor, tensor_stats
from kfac_engine.curvature.factors.eigenbasis import (
    EigenbasisFactor,
    OverRanks,
    set_bases,
    without_basis,
)
from kfac_engine.curvature.factors.measurement import LetGo, Measurement, ToMeasure, UnreadValues
from kfac_engine.curvature.factors.statistics import Count, Sizes
from kfac_engine.errors import InputError


@dataclass(frozen=True, slots=True)
class Update:
    """A measured batch, which no average has received yet."""

    measured: Mapping[FisherFactor, Measurement]  # measurements in new arrays, by factor
    # What is measured straight into the averages of the other factors.
    straight: Mapping[FisherFactor, ToMeasure] = field(default_factory=dict)
    left_out: Collection[FisherFactor] = ()  # factors whose averages do not change
    unread: UnreadValues | None = None  # the values of ``straight``
    backend: Backend | None = None  # array library of these factors

    @property
    def every(self) -> Mapping[FisherFactor, Measurement | ToMeasure]:
        """All measurements, in an order that is the same on all processes."""
        return {**self.straight, **self.measured}

    def shares(self, totals: Mapping[FisherFactor, Count]) -> "Update":
        """Return the shares of this process in a batch that has the counts ``totals``."""
        measured = {f: f.share(m, totals[f]) for f, m in self.measured.items()}
        straight = {f: f.share(m, totals[f]) for f, m in self.straight.items()}
        return replace(self, measured=measured, straight=straight)

    def of(self, factors: Collection[FisherFactor]) -> "Update":
        """Return the update of some factors."""
        measured = {f: m for f, m in self.measured.items() if f in factors}
        straight = {f: m for f, m in self.straight.items() if f in factors}
        return replace(self, measured=measured, straight=straight)

    def commit(self, decay: float, weight: float = 1.0) -> None:
        """Update the averages by a batch with a weight; the update cannot be used again.

        ``decay`` is the weight of the old averages, in [0, 1].
        """

        def commit(factor: FisherFactor, measurement: Measurement | ToMeasure) -> None:
            factor.commit(measurement, decay, weight, counts=factor not in self.left_out)
            if self.unread is not None and isinstance(measurement, ToMeasure):
                self.unread.read(measurement.names)

        tasks = list[Task]()
        for factor, whole in self.straight.items():
            factor.wait()  # a pending refresh may belong to several factors
            tasks.append(Task(whole.sizes.work, partial(commit, factor, whole)))
        if self.backend is not None:
            self.backend.run_parallel(tasks)
        for factor, measurement in self.measured.items():
            commit(factor, measurement)


# Measurements by factor, in the order of the factors.
Measurements: TypeAlias = dict[FisherFactor, Measurement]


class Readers:
    """Factors that measure the same batches, and the names of the values that they read.

    Args:
        factors: In the order in which they measure.
        backend: Their array library.
        gradients: The differentiated value of each gradient, by the name that factors read.
            Gradients change from source to source.
        examples: Required number of examples; None requires the number of the first factor.
        whose: Origin of that number, for messages.

    Attributes:
        forward: Names of the values of a trace that they read.
        gradients: Those of ``gradients`` that they read.
    """

    def __init__(
        self,
        factors: Iterable[FisherFactor],
        backend: Backend,
        gradients: Mapping[str, str],
        examples: int | None = None,
        whose: str = "",
    ) -> None:
        self.factors = tuple(factors)
        self._backend = backend
        self._examples, self._whose = examples, whose
        statistics = [factor.statistic for factor in self.factors]
        names = [tuple(dict.fromkeys(factor.names())) for factor in self.factors]
        # Lengths may be read after the update: without them, a trace computes them again.
        lengths = {name for statistic in statistics for name in statistic.lengths()}
        every = dict.fromkeys(
            name for f in self.factors for name in (*f.names(), *f.statistic.lengths())
        )
        self.gradients = {name: value for name, value in gradients.items() if name in every}
        self.forward = tuple(name for name in every if name not in gradients)
        pairs = zip(self.factors, names, strict=True)
        # Factors whose statistic reads all examples at once, and the others.
        self._whole = tuple(factor for factor in self.factors if not factor.sources)
        self._in_parts = tuple(factor for factor in self.factors if factor.sources)
        self._moving = [f for f, its_names in pairs if not gradients.keys().isdisjoint(its_names)]
        self._all_names = tuple(dict.fromkeys(chain(*names)))
        self._bases = [f for f in self.factors if isinstance(f, EigenbasisFactor)]
        self._readers = Counter(chain(lengths, *names))
        lasting = all(s.sizes_by_shape and not s.products() for s in statistics)
        self._shaped = tuple(every) if lasting else ()
        # Shapes of the last batch, and the sizes that follow from them.
        self._last: tuple[list[tuple[int, ...]], dict[FisherFactor, Sizes]] = [], {}

    def measure(
        self,
        values: dict[str, Array],
        release: LetGo | None = None,
        straight: Collection[FisherFactor] | None = None,
        over_ranks: OverRanks = lambda measured: measured,
    ) -> Update:
        """Measure a batch of one source; no average changes.

        ``values`` has the values that factors read; the update empties it, and ``release`` receives
        the names of values that no factor reads any more. The factors of ``straight``, by default
        all, measure the batch when the update is committed, straight into their averages.
        ``over_ranks`` is as for ``set_bases``. A ``KfacError`` is raised if the batch does not fit
        a factor.
        """
        sizes, unread = self._check(values), UnreadValues(values, self._readers, release)
        if self._bases:
            set_bases(self._bases, values, over_ranks)
        later, others = self._whole, self._in_parts
        if straight is not None:
            later = tuple(f for f in self._whole if f in straight)
            others = tuple(f for f in self.factors if f.sources or f not in straight)
        pairs = {factor: factor.to_measure(values, sizes[factor]) for factor in later}
        measured = self._measured(values, sizes, others, unread) if others else {}
        return Update(measured, pairs, unread=unread, backend=self._backend)

    def measure_sum(self, sources: Iterator[dict[str, Array]], *, joined: bool) -> Measurements:
        """Measure the sum over the sources of a batch; no average changes.

        ``sources`` have the values that the factors read. Each mapping is emptied before the next
        one is requested. The bases of EKFAC are set before. ``joined`` is as for
        ``FisherFactor.measure``.
        """
        values = next(sources)
        sums = self._measured(values, self._check(values), self.factors, joined=joined)
        values.clear()
        for values in sources:
            self._add_source(sums, values)
            values.clear()
        return sums

    def add_part(self, values: dict[str, Array], sums: Measurements) -> None:
        """Measure a part of a batch of one source, and join it to the parts before in ``sums``.

        A ``KfacError`` is raised if the part does not fit a factor.
        """
        sums |= self._measured(values, self._check(values), self.factors, before=sums)

    @property
    def parts_of_bases(self) -> tuple[FisherFactor, ...]:
        """The factors whose first batch sets the bases of EKFAC; none after that batch."""
        new = without_basis(self._bases)
        return tuple(dict.fromkeys(part for factor in new for part in factor.kronecker_factors))

    def _measured(
        self,
        values: Values,
        sizes: Mapping[FisherFactor, Sizes],
        factors: Sequence[FisherFactor],
        unread: UnreadValues | None = None,
        *,
        joined: bool = True,
        before: Mapping[FisherFactor, Measurement] = MappingProxyType({}),
    ) -> Measurements:
        """Measure a checked batch for some factors, the longest work first."""
        measured: Measurements = {}

        def measure(factor: FisherFactor) -> None:
            measured[factor] = factor.measure(
                values, sizes[factor], joined=joined, before=before.get(factor)
            )
            if unread is not None:
                unread.read(factor.names())

        for factor in factors:
            factor.wait()  # a pending refresh may belong to several factors
        self._backend.run_parallel([Task(sizes[f].work, partial(measure, f)) for f in factors])
        return {factor: measured[factor] for factor in factors}

    def _add_source(self, sums: Measurements, values: dict[str, Array]) -> None:
        """Add a further source of a batch to the measurements that it changes."""
        names = dict.fromkeys(name for f in self._moving for name in f.names())
        known = tensor_stats(tuple(names), values, self._backend)
        sizes = {factor: factor.check(values, known) for factor in self._moving}

        def add(factor: FisherFactor) -> None:
            sums[factor] = factor.add_source(sums[factor], values)

        self._backend.run_parallel([Task(size.work, partial(add, f)) for f, size in sizes.items()])

    def _check(self, values: Values) -> dict[FisherFactor, Sizes]:
        """Check a batch for all factors; return the sizes of their measurements.

        A batch with the shapes of the last one has its sizes where they follow from shapes.
        """
        known = tensor_stats(self._all_names, values, self._backend)
        shapes: list[tuple[int, ...]] = []
        if len(self._shaped) == len(values) and known.all_finite:  # rows have no weights
            shapes = [values[name].shape for name in self._shaped]
            if shapes == self._last[0]:
                return self._last[1]
        expected, whose = self._examples, self._whose
        checked = {}
        for factor in self.factors:
            sizes = checked[factor] = factor.check(values, known)
            examples = sizes.count.examples
            if expected is None:
                expected = examples
            if examples != expected:
                whose = whose if self._examples else f"that of {self.factors[0].name}"
                raise InputError(
                    f"Batch size {examples} for factor {factor.name} did not match value "
                    f"{expected}, {whose}."
                )
        if all(factor.average.value is not None for factor in self.factors):
            self._last = shapes, checked
        return checked
