"""Statistics of batches for the factors of an estimator: measured, combined, then committed.

Factors read the activations of a batch and the gradients of each source of an estimation mode.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.estimation_modes import MODES, Draws, EstimationMode
from kfac_engine.curvature.factors.base import FisherFactor, take
from kfac_engine.curvature.factors.eigenbasis import OverRanks, begin_bases, without_basis
from kfac_engine.curvature.factors.measurement import LetGo
from kfac_engine.curvature.factors.row_weights import ExamplePlaces, ExampleWeights, LayerRows
from kfac_engine.curvature.factors.updater import FactorUpdater, Measurements, Update
from kfac_engine.distributed.shards import AnyGenerator, Placement, RowGenerator, RowRange
from kfac_engine.errors import UnsupportedError
from kfac_engine.losses.base import RegisteredLoss
from kfac_engine.losses.observed import root, times


class Trace(Protocol):
    """One evaluation of a model, from an ONNX file or from other code."""

    def __getitem__(self, name: str, /) -> Array:
        """Return a value by name: an activation, a loss input or targets."""

    def vjp(self, cotangents: Mapping[str, Array], wrt: Sequence[str]) -> Mapping[str, Array]:
        """Return gradients of ``Σ ⟨cotangent, value⟩`` with respect to ``wrt``, by name."""


# Loss input to the factor of its cotangents: a number, or an array that broadcasts to the input.
Scales: TypeAlias = Mapping[str, float | Array]
# Names of the values of a trace that factors read, and name of a gradient, as factors read it, to
# the differentiated value.
Reads: TypeAlias = tuple[tuple[str, ...], Mapping[str, str]]
ExampleGradients: TypeAlias = Callable[
    [Any, Mapping[str, Array], Sequence[str]], Iterator[Mapping[str, Array]]
]


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """A batch, or a part of one, whose statistics are measured."""

    trace: Trace  # the evaluation
    scales: Scales  # factors of the cotangents, by loss input; 1 where absent
    # Weights of the examples, besides ``scales``; None if no target has a weight.
    weights: ExampleWeights | None = None
    draws: Draws | None = None  # draws that replace random ones, by loss name
    # Numbers of the loss functions of which no target counts in the whole batch.
    absent: frozenset[int] = frozenset()


@dataclass(eq=False)
class CovarianceUpdates:
    """Measures batches for factors: propagates a mode's sources to the values they read."""

    mode: EstimationMode  # computes the cotangents of the sources
    losses: tuple[RegisteredLoss, ...]  # the losses, with their parts
    backend: Backend  # array library of the factors
    rng: np.random.Generator  # generator of sampled targets and random signs; advanced by each pass
    factors: Sequence[FisherFactor]  # all factors
    alone: tuple[FisherFactor, ...]  # factors whose statistics read gradients of single examples
    # The differentiated value of each gradient, by the name that factors read.
    gradients: Mapping[str, str]
    # The layers. Weights of targets decide which rows of their inputs count.
    layers: tuple[LayerRows, ...]
    # Computes gradients of single examples; None if traces cannot.
    examples: ExampleGradients | None
    variables: tuple[str, ...]  # parameters whose gradients are summed over the sources
    batch_size: int | None  # size that every batch must have; None for any size
    name: str  # name of the estimator, for messages
    rows: RowRange | None = (
        None  # the rows of the batch that this process has; None for all of them
    )
    # Place of the examples in the draws of each loss, by name; the first axis where absent.
    placements: Mapping[str, Placement] = field(default_factory=dict)
    places: ExamplePlaces = field(default_factory=ExamplePlaces)  # where values have the examples
    # Name of a value whose first axis has the examples only; empty if the first axis of the first
    # loss input has them.
    batch: str = ""
    divided: bool = False  # whether batches are divided among processes
    # Returns means over all processes, from the measurements of this one.
    over_ranks: OverRanks = field(default=lambda measured: measured)
    # Factors that measure a whole batch straight into their averages; None for all.
    straight: Collection[FisherFactor] | None = None
    # Returns the values that each loss function depends on, in the order of the losses.
    reached: Callable[[], Sequence[Collection[str]]] = tuple
    # ``Σ_sources gradient / batch_size`` of the last update, for each variable.
    params_stats: list[Array] = field(default_factory=list)
    updater: FactorUpdater = field(init=False)  # updates the factors that read whole batches
    _reads: dict[tuple[FisherFactor, ...], Reads] = field(default_factory=dict, init=False)
    _numbers: dict[FisherFactor, frozenset[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Create the updater for factors whose statistics need a whole batch at once."""
        self.updater = self._updater_of(f for f in self.factors if f not in self.alone)

    def read_values(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the values with respect to which the losses are differentiated.

        The first tuple is for the losses of a whole batch, the second for the losses of single
        examples.
        """
        alone = tuple(self.gradients[name] for f in self.alone for name in f.statistic.names())
        return tuple(v for v in dict.fromkeys(self.gradients.values()) if v not in alone), alone

    def measured_batch(
        self, trace: Trace, draws: Draws | None = None, scales: Scales | None = None
    ) -> MeasuredBatch:
        """Return a batch to measure; by default, weights of predictions give its scales."""
        if scales is not None:
            return MeasuredBatch(trace, scales, None, draws)
        return MeasuredBatch(trace, self.scales_of(trace), self._weights_of(trace), draws)

    def scales_of(self, trace: Trace) -> dict[str, Array]:
        """Return the roots of the weights of the predictions that the losses read."""
        parts = (part for loss in self.losses for part in loss.parts)
        weights = {name: t.row_weights(trace) for t in parts for name in t.inputs}
        return {name: root(rows) for name, rows in weights.items() if rows is not None}

    def divide(self, over_ranks: OverRanks, linear: Collection[FisherFactor]) -> None:
        """Divide batches among processes; see ``FisherEstimator.divide``."""
        self.over_ranks, self.straight = over_ranks, frozenset(linear)
        self.divided = True

    def measure(
        self,
        batch: MeasuredBatch,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
        *,
        by_example: bool = True,
    ) -> Update:
        """Measure one batch for all factors; averages do not change.

        The ``commit`` of the returned update changes them. With ``by_example``, factors that read
        gradients of single examples are measured, too. Other arguments and errors are as for
        ``FisherEstimator.update_covariances``.
        """
        alone = self.alone if by_example else ()
        return self._measured(self.updater, alone, batch, release, propagated)

    def measure_part(
        self,
        sums: Measurements,
        part: MeasuredBatch,
        bases: Sequence[FisherFactor] = (),
        *,
        by_example: bool = True,
    ) -> None:
        """Measure a part of a batch for all factors, and join it to the parts before in ``sums``.

        If ``bases`` has the factors of ``parts_of_bases``, only these are measured. No average
        changes. Errors are as for ``measure``.
        """
        updater = self._updater_of(iter(bases)) if bases else self.updater
        alone = () if bases or not by_example else self.alone
        measured = self._measure_examples(alone, part)
        values = self._of_batch(updater.factors, part, {})
        if self.mode.one_source:
            updater.add_part(next(values), sums)
        else:
            measured |= updater.measure_sum(values, joined=True)
        for factor, measurement in measured.items():
            before = sums.get(factor)
            sums[factor] = measurement if before is None else factor.join(before, measurement)

    @property
    def parts_of_bases(self) -> tuple[FisherFactor, ...]:
        """The factors whose first batch sets the bases of EKFAC; none after that batch."""
        return self.updater.parts_of_bases

    def set_bases(self, sums: Measurements) -> None:
        """Set the first bases of EKFAC from measurements of ``parts_of_bases``."""
        begin_bases(without_basis(self.updater.factors), self.over_ranks(sums))

    def joined(self, sums: Measurements, absent: frozenset[int] = frozenset()) -> Update:
        """Return the update by the batch whose parts have been measured.

        ``absent`` is that of the whole batch.
        """
        return Update(sums, left_out=self.left_out(absent))

    def left_out(self, absent: frozenset[int]) -> frozenset[FisherFactor]:
        """Return the factors of layers on which only ``absent`` losses depend.

        Their averages do not change: such a batch has no gradient at these layers.
        """
        if not absent:
            return frozenset()
        numbers = self.losses_of_factors()
        return frozenset(f for f, its in numbers.items() if its and its <= absent)

    def losses_of_factors(self) -> Mapping[FisherFactor, frozenset[int]]:
        """Return the numbers of the loss functions from which the gradients of a factor come.

        A factor of inputs has those of its layers. There are none where they are not known.
        """
        reached = self.reached() if not self._numbers else ()
        for factor in self.factors if not self._numbers else ():
            names = {*factor.statistic.names()}
            values = {self.gradients[name] for name in names if name in self.gradients}
            layers = (layer for layer in self.layers if not names.isdisjoint(layer.inputs))
            values = values or values.union(*(layer.outputs for layer in layers))
            numbers = (i for i, its in enumerate(reached) if not values.isdisjoint(its))
            self._numbers[factor] = frozenset(numbers)
        return self._numbers

    def update(
        self,
        decay: float,
        trace: Trace,
        draws: Draws | None = None,
        scales: Scales | None = None,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
    ) -> None:
        """Update all averages by one batch.

        ``decay`` is the weight of the old averages, in [0, 1]. Other arguments are as for
        ``FisherEstimator.update_covariances``. After an error, averages and generator have not
        changed.
        """
        self._require_whole_batches()
        with self.restored_on_error():
            batch = self.measured_batch(trace, draws, scales)
            self.measure(batch, release, propagated).commit(decay)

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
        alone = tuple(factor for factor in factors if factor in self.alone)
        updater = self._updater_of(factor for factor in factors if factor not in alone)
        with self.restored_on_error():
            update = self._measured(updater, alone, self.measured_batch(trace, draws, scales))
            update.commit(decay, weight)

    def _measured(
        self,
        updater: FactorUpdater,
        alone: tuple[FisherFactor, ...],
        batch: MeasuredBatch,
        release: LetGo | None = None,
        propagated: dict[str, Array] | None = None,
    ) -> Update:
        stats: dict[str, Array] = {}
        singles = self._measure_examples(alone, batch)
        if propagated is None:
            values = self._of_batch(updater.factors, batch, stats)
        else:
            values = self._given(updater.factors, batch, propagated)
        if self.mode.one_source:
            update = updater.measure(next(values), release, self.straight, self.over_ranks)
        else:
            if parts := updater.parts_of_bases:
                # All sources are propagated once more before the first update of EKFAC.
                bits = self.rng.bit_generator
                before: Mapping[str, Any] = bits.state
                updater.prepare(self._of_batch(parts, batch, {}), self.over_ranks)
                bits.state = before
            update = Update(updater.measure_sum(values, joined=self.divided))
        self.params_stats = [total / (self.batch_size or 1) for total in stats.values()]
        measured = {**update.measured, **singles}
        return replace(update, measured=measured, left_out=self.left_out(batch.absent))

    def _require_whole_batches(self) -> None:
        """Refuse an update of this process alone, if batches are divided among several."""
        if self.divided:
            raise UnsupportedError(
                f"the batches of {self.name} are divided among several processes; call "
                f"engine.update_statistics(trace) in all of them, which joins the statistics."
            )

    def _updater_of(self, factors: Iterator[FisherFactor]) -> FactorUpdater:
        return FactorUpdater(
            tuple(factors),
            self.backend,
            self.gradients,
            self.batch_size,
            f"the batch_size of {self.name}",
        )

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores generator and element types after an error.

        The draws of a refused batch are not used, and its numbers need no wider averages.
        """
        bits, factors = self.rng.bit_generator, self.updater.factors
        before: Mapping[str, Any] = bits.state
        types = [factor.narrowest for factor in factors]

        def restore() -> None:
            bits.state = before
            for factor, narrowest in zip(factors, types, strict=True):
                factor.narrowest = narrowest

        return restore

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Return a context that restores a ``snapshot`` after an error."""
        restore = self.snapshot()
        try:
            yield
        except BaseException:
            restore()
            raise

    def _measure_examples(
        self, factors: tuple[FisherFactor, ...], batch: MeasuredBatch
    ) -> Measurements:
        """Measure some factors of ``alone``; averages and the generator do not change."""
        if not factors or self.examples is None:
            return {}
        generator, backend = self.rng.bit_generator.state, self.backend
        read, differentiated = self._reads_of(factors)
        forward = take(batch.trace, read, backend)
        names = tuple(differentiated.values())
        measured: Measurements = {}
        try:
            for cotangents in self._cotangents(batch):
                for gradients in self.examples(batch.trace, cotangents, names):
                    arrays = take(gradients, names, backend)
                    values = forward | {n: arrays[value] for n, value in differentiated.items()}
                    sizes = {factor: factor.check(values) for factor in factors}
                    measured = {
                        factor: factor.add_source(measured[factor], values)
                        if factor in measured
                        else factor.measure(values, size)
                        for factor, size in sizes.items()
                    }
        finally:
            self.rng.bit_generator.state = generator
        return measured

    def _of_batch(
        self, factors: tuple[FisherFactor, ...], batch: MeasuredBatch, stats: dict[str, Array]
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of a batch that factors read, by name, once for each source.

        No other reference to a gradient remains. ``stats`` receives the sum of the gradients of
        each variable over sources.
        """
        (names, differentiated), backend = self._reads_of(factors), self.backend
        trace, weights = batch.trace, batch.weights
        forward = take(trace, names, backend)
        wrt = tuple(dict.fromkeys((*differentiated.values(), *self.variables)))
        layers: tuple[LayerRows, ...] = ()
        probed = False
        if weights:
            layers, read = self._layers_of(forward), {*differentiated.values()}
            probed = any(not read.issuperset(layer.outputs) for layer in layers)
            probed |= weights.by_ratio or (weights.by_gradient and not self.mode.one_source)
            if probed:
                forward |= self._probed_rows(layers, batch, weights)
        for cotangents in self._cotangents(batch):
            gradients = take(trace.vjp(cotangents, wrt), wrt, backend) if wrt else {}
            for name in self.variables:
                gradient = gradients[name]
                stats[name] = stats[name] + gradient if name in stats else gradient
            values = forward | {n: gradients[value] for n, value in differentiated.items()}
            if weights and not probed:
                values |= weights.of_rows(layers, gradients, backend)
            if self.mode.one_source:
                forward.clear()
            del gradients, cotangents
            yield values

    def _given(
        self,
        factors: tuple[FisherFactor, ...],
        batch: MeasuredBatch,
        propagated: dict[str, Array],
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of the only source of a mode, from gradients that exist already."""
        read, differentiated = self._reads_of(factors)
        values = take(batch.trace, read, self.backend)
        arrays = take(propagated, differentiated.values(), self.backend)
        propagated.clear()
        if batch.weights:
            layers, weights = self._layers_of(values), batch.weights
            values |= (
                self._probed_rows(layers, batch, weights)
                if weights.by_ratio
                else weights.of_rows(layers, arrays, self.backend)
            )
        values.update((name, arrays.pop(value)) for name, value in differentiated.items())
        yield values

    def _layers_of(self, names: Collection[str]) -> tuple[LayerRows, ...]:
        """Return the layers whose inputs are among some values."""
        return tuple(layer for layer in self.layers if not {*names}.isdisjoint(layer.inputs))

    def _probed_rows(
        self, layers: Sequence[LayerRows], batch: MeasuredBatch, weights: ExampleWeights
    ) -> dict[str, Array]:
        """Return the weights of the rows of layers, from gradients with random signs."""
        outputs = tuple(dict.fromkeys(name for layer in layers for name in layer.outputs))
        if not outputs:
            return {}
        signs = MODES["curvature_prop"](self.losses, batch.trace, np.random.default_rng(0))
        (source,) = signs
        cotangents = scaled(source, batch.scales)
        several = [cotangents, *([weights.times_roots(cotangents)] if weights.by_ratio else ())]
        gradients, *weighted = (
            take(batch.trace.vjp(each, outputs), outputs, self.backend) for each in several
        )
        return weights.of_rows(layers, gradients, self.backend, *weighted)

    def _weights_of(self, trace: Trace) -> ExampleWeights | None:
        """Return the weights of the examples of a batch, from the values that the losses read."""
        parts = [part for loss in self.losses for part in loss.parts]
        rows = [(part, part.row_weights(trace)) for part in parts]
        examples = len(trace[self.batch or parts[0].inputs[0]])
        return ExampleWeights.of(rows, trace, examples, self.places)

    def _cotangents(self, batch: MeasuredBatch) -> Iterator[dict[str, Array]]:
        rng: AnyGenerator = self.rng
        if self.rows is not None:
            rng = RowGenerator(self.rng, self.rows, self.placements)
        for source in self.mode(self.losses, batch.trace, rng, batch.draws):
            yield scaled(source, batch.scales)

    def _reads_of(self, factors: tuple[FisherFactor, ...]) -> Reads:
        """Return the names of the values that factors read. They never change."""
        if factors not in self._reads:
            statistics = [factor.statistic for factor in factors]
            names = dict.fromkeys(name for s in statistics for name in (*s.names(), *s.lengths()))
            gradients = {name: value for name, value in self.gradients.items() if name in names}
            forward = tuple(name for name in names if name not in gradients)
            self._reads[factors] = forward, gradients
        return self._reads[factors]


def scaled(source: Mapping[str, Array], scales: Scales) -> dict[str, Array]:
    """Return each cotangent times the scale of its loss input; a missing scale counts as 1."""
    pairs = {name: (array, scales.get(name, 1.0)) for name, array in source.items()}
    return {n: a * k if isinstance(k, float) else times(a, k) for n, (a, k) in pairs.items()}
