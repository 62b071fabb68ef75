"""Statistics of batches for the factors of an estimator: measured, then committed to averages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kfac_engine._types import Array
from kfac_engine.curvature.estimation_modes import Draws
from kfac_engine.curvature.factors.base import Combine, FisherFactor
from kfac_engine.curvature.factors.eigenbasis import begin_bases, without_basis
from kfac_engine.curvature.factors.updater import FactorUpdater, LetGo, PartSums, PendingUpdate
from kfac_engine.curvature.sources import MeasuredBatch, Scales, Sources, Trace
from kfac_engine.errors import UnsupportedError


class CovarianceUpdates:
    """Measures batches for factors.

    Args:
        sources: Propagates the sources of the estimation mode; its generator draws.
        factors: All factors.
        batch_size: Size that every batch must have; None for any size.
        name: Name of the estimator, for messages.

    Attributes:
        updater: Updates the factors that read whole batches.
        params_stats: ``Σ_sources gradient / batch_size`` of the last update, for each variable.
        divided: Whether batches are divided among processes, which combine what they measure.
    """

    def __init__(
        self,
        sources: Sources,
        factors: Sequence[FisherFactor],
        batch_size: int | None,
        name: str,
    ) -> None:
        self.sources = sources
        self.params_stats: list[Array] = []
        self.divided = False
        self._batch_size, self._name = batch_size, name
        self.updater = self._updater_of(f for f in factors if f not in sources.alone)

    def divide(self, combine: Combine, linear: Collection[FisherFactor]) -> None:
        """Divide batches among processes; see ``FisherEstimator.divide``."""
        self.updater.combine, self.updater.linear = combine, frozenset(linear)
        self.divided = True

    def measure(
        self,
        batch: MeasuredBatch,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
        *,
        by_example: bool = True,
    ) -> PendingUpdate:
        """Measure one batch for all factors; averages do not change.

        The ``commit`` of the returned update changes them. With ``by_example``, factors that read
        gradients of single examples are measured, too. Other arguments and errors are as for
        ``FisherEstimator.update_covariances``.
        """
        return self._measured(self.updater, self._alone(by_example), batch, release, propagated)

    def measure_part(
        self,
        sums: PartSums,
        part: MeasuredBatch,
        bases: Sequence[FisherFactor] = (),
        *,
        by_example: bool = True,
    ) -> None:
        """Measure a part of a batch for all factors, into ``sums``; averages do not change.

        If ``bases`` has the factors of ``parts_of_bases``, only these are measured. Errors are as
        for ``measure``.
        """
        updater = self._updater_of(iter(bases)) if bases else self.updater
        alone = () if bases else self._alone(by_example)
        singles = self.sources.measure_examples(alone, part)
        values = self.sources.of_batch(updater.factors, part, {})
        if self.sources.mode.one_source:
            updater.add_part(next(values), sums)
        else:
            singles = [*updater.measure_sum(values, singles, part=True).measured]
        for factor, measurement in singles:
            sums.add(factor, measurement)

    @property
    def parts_of_bases(self) -> tuple[FisherFactor, ...]:
        """The factors whose first batch sets the bases of EKFAC; none after it."""
        return self.updater.parts_of_bases

    def set_bases(self, sums: PartSums) -> None:
        """Set the first bases of EKFAC from measurements of ``parts_of_bases``."""
        measured = sums.update(self.parts_of_bases).measured
        if self.updater.combine is not None:
            self.updater.combine([measurement for _, measurement in measured])
        begin_bases(without_basis(self.updater.factors), dict(measured))  # type: ignore[arg-type] # Kronecker factors

    def joined(self, sums: PartSums, *, by_example: bool = True) -> PendingUpdate:
        """Return the update by the batch whose parts have been measured."""
        return sums.update((*self.updater.factors, *self._alone(by_example)))

    def _alone(self, by_example: bool) -> tuple[FisherFactor, ...]:
        """Return the factors that read gradients of single examples, if they are measured."""
        return self.sources.alone if by_example else ()

    def update(
        self,
        decay: float,
        trace: Trace,
        draws: Draws | None = None,
        scales: Scales | None = None,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
    ) -> None:
        """Update all averages by one batch, combined with the batches of other processes.

        ``decay`` is the weight of the old averages, in [0, 1]. Other arguments are as for
        ``FisherEstimator.update_covariances``. After an error, averages and generator have not
        changed.
        """
        self._require_whole_batches()
        with self.restored_on_error():
            batch = self.sources.measured_batch(trace, draws, scales)
            pending = self.measure(batch, release, propagated)
            self.updater.combined(pending).commit(decay)

    def add(
        self,
        factors: Sequence[FisherFactor],
        trace: Trace,
        decay: float,
        weight: float = 1.0,
        draws: Draws | None = None,
        scales: Scales | None = None,
    ) -> None:
        """Update the averages of some factors by one batch with a weight.

        Other arguments and errors are as for ``update``.
        """
        self._require_whole_batches()
        alone = tuple(factor for factor in factors if factor in self.sources.alone)
        updater = self._updater_of(factor for factor in factors if factor not in alone)
        updater.combine = self.updater.combine
        with self.restored_on_error():
            pending = self._measured(
                updater, alone, self.sources.measured_batch(trace, draws, scales)
            )
            updater.combined(pending).commit(decay, weight)

    def _measured(
        self,
        updater: FactorUpdater,
        alone: tuple[FisherFactor, ...],
        batch: MeasuredBatch,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
    ) -> PendingUpdate:
        stats: dict[str, Array] = {}
        singles = self.sources.measure_examples(alone, batch)
        if propagated is None:
            values = self.sources.of_batch(updater.factors, batch, stats)
        else:
            values = self.sources.given(updater.factors, batch, propagated)
        if self.sources.mode.one_source:
            pending = updater.measure(next(values), release, singles)
        else:
            self._prepare(updater, batch)
            pending = updater.measure_sum(values, singles)
        self.params_stats = [total / (self._batch_size or 1) for total in stats.values()]
        return pending

    def _prepare(self, updater: FactorUpdater, batch: MeasuredBatch) -> None:
        """Propagate all sources once more before the first update of EKFAC, for its bases."""
        parts = updater.parts_of_bases
        if parts:
            bits = self.sources.rng.bit_generator
            before: Mapping[str, Any] = bits.state
            updater.prepare(self.sources.of_batch(parts, batch, {}))
            bits.state = before

    def _require_whole_batches(self) -> None:
        """Refuse an update of this process alone, if batches are divided among several."""
        if self.divided:
            raise UnsupportedError(
                f"the batches of {self._name} are divided among several processes; call "
                f"engine.update_statistics(trace) in all of them, which combines the statistics."
            )

    def _updater_of(self, factors: Iterator[FisherFactor]) -> FactorUpdater:
        return FactorUpdater(
            tuple(factors),
            self.sources.backend,
            self.sources.gradients,
            self._batch_size,
            f"the batch_size of {self._name}",
        )

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Return a context that restores generator and element types after an error.

        The draws of a refused batch are not used, and its numbers need no wider averages.
        """
        bits, factors = self.sources.rng.bit_generator, self.updater.factors
        before: Mapping[str, Any] = bits.state
        types = [factor.narrowest for factor in factors]
        try:
            yield
        except BaseException:
            bits.state = before
            for factor, narrowest in zip(factors, types, strict=True):
                factor.narrowest = narrowest
            raise
