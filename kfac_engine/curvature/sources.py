"""The values of a batch that factors read: activations, and gradients of each source."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.estimation_modes import MODES, Draws, EstimationMode
from kfac_engine.curvature.factors.base import FisherFactor, computed, take
from kfac_engine.curvature.factors.row_weights import ExampleWeights, LayerRows
from kfac_engine.curvature.factors.updater import Measured
from kfac_engine.distributed.shards import AnyGenerator, Placement, RowGenerator, Rows
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
    """A batch, or a part of one, whose statistics are measured.

    Attributes:
        trace: The evaluation.
        scales: Loss input to the factor of its cotangents; 1 where absent.
        weights: Weights of the examples, next to ``scales``; None if no target has a weight.
        draws: Fixes the randomness, by loss name.
    """

    trace: Trace
    scales: Scales
    weights: ExampleWeights | None = None
    draws: Draws | None = None


@dataclass(slots=True)
class Sources:
    """Propagates the sources of an estimation mode back to the values that factors read.

    Attributes:
        mode: Computes the cotangents of the sources.
        losses: The losses, with their parts.
        backend: Array library of the factors.
        rng: Generator of sampled targets and random signs; advanced by each pass.
        examples: Computes gradients of single examples; None if traces cannot.
        variables: Parameters whose gradients are summed over the sources.
        gradients: Name of a gradient, as factors read it, to the differentiated value.
        alone: Factors whose statistics read gradients of single examples.
        rows: The rows of the batch that this process has; None for all of them.
        placements: Name of a loss to the place of the examples in its draws; the first axis where
            absent.
        layers: The layers, whose inputs have rows that count or not.
        axes: Name of a value to its axis of examples; 0 where absent.
        batch: Name of a value whose first axis has the examples only; empty if the first axis of
            the first loss input has them.
    """

    mode: EstimationMode
    losses: tuple[RegisteredLoss, ...]
    backend: Backend
    rng: np.random.Generator
    examples: ExampleGradients | None = None
    variables: tuple[str, ...] = ()
    gradients: dict[str, str] = field(default_factory=dict)
    alone: tuple[FisherFactor, ...] = ()
    rows: Rows | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    layers: tuple[LayerRows, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    batch: str = ""
    _reads: dict[tuple[FisherFactor, ...], Reads] = field(default_factory=dict)

    def gradient_name(self, value: str) -> str:
        """Register the gradient with respect to a value, and return its name."""
        name = f"∂{value}"
        self.gradients[name] = value
        return name

    def read_values(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the values by which the losses are differentiated.

        The first tuple is for the losses of a whole batch, the second for the losses of single
        examples.
        """
        alone = tuple(self.gradients[name] for f in self.alone for name in f.statistic.names())
        return tuple(v for v in dict.fromkeys(self.gradients.values()) if v not in alone), alone

    def measured_batch(
        self, trace: Trace, draws: Draws | None = None, scales: Scales | None = None
    ) -> MeasuredBatch:
        """Return a batch; without scales, with the weights of the predictions that losses read."""
        if scales is not None:
            return MeasuredBatch(trace, scales, None, draws)
        return MeasuredBatch(trace, self.scales_of(trace), self._weights_of(trace), draws)

    def of_batch(
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
        layers = self._layers_of(forward) if weights else ()
        read = {*differentiated.values()}
        probed = any(not read.issuperset(layer.outputs) for layer in layers)
        if weights and weights.by_gradient:
            probed = probed or not self.mode.one_source
        if weights and probed:
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
        gradients = take(batch.trace.vjp(cotangents, outputs), outputs, self.backend)
        return weights.of_rows(layers, gradients, self.backend)

    def _weights_of(self, trace: Trace) -> ExampleWeights | None:
        """Return the weights of the examples of a batch, from the values that the losses read."""
        parts = [part for loss in self.losses for part in loss.parts]
        rows = [(part, part.row_weights(trace)) for part in parts]
        examples = len(trace[self.batch or parts[0].inputs[0]])
        return ExampleWeights.of(rows, trace, examples, self.axes)

    def scales_of(self, trace: Trace) -> dict[str, Array]:
        """Return the roots of the weights of the predictions that the losses read."""
        parts = (part for loss in self.losses for part in loss.parts)
        weights = {name: t.row_weights(trace) for t in parts for name in t.inputs}
        return {name: root(rows) for name, rows in weights.items() if rows is not None}

    def _cotangents(self, batch: MeasuredBatch) -> Iterator[dict[str, Array]]:
        rng: AnyGenerator = self.rng
        if self.rows is not None:
            rng = RowGenerator(self.rng, self.rows, self.placements)
        for source in self.mode(self.losses, batch.trace, rng, batch.draws):
            yield scaled(source, batch.scales)

    def measure_examples(
        self, factors: tuple[FisherFactor, ...], batch: MeasuredBatch
    ) -> list[Measured]:
        """Measure some factors of ``alone``; averages and the generator do not change."""
        if not factors or self.examples is None:
            return []
        generator, backend = self.rng.bit_generator.state, self.backend
        read, differentiated = self._reads_of(factors)
        forward = take(batch.trace, read, backend)
        names = tuple(differentiated.values())
        measured: list[Measured] = []
        try:
            for cotangents in self._cotangents(batch):
                for gradients in self.examples(batch.trace, cotangents, names):
                    arrays = take(gradients, names, backend)
                    values = forward | {n: arrays[value] for n, value in differentiated.items()}
                    sizes = [factor.check(values) for factor in factors]
                    for _, measurement in measured:
                        measurement.add(values)
                    measured = measured or [
                        (factor, computed(factor.measure(values, size)))
                        for factor, size in zip(factors, sizes, strict=True)
                    ]
        finally:
            self.rng.bit_generator.state = generator
        return measured

    def given(
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
            values |= batch.weights.of_rows(self._layers_of(values), arrays, self.backend)
        values.update((name, arrays.pop(value)) for name, value in differentiated.items())
        yield values

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
    """Return cotangents times the scales of their loss inputs, which are 1 by default."""
    pairs = {name: (array, scales.get(name, 1.0)) for name, array in source.items()}
    return {n: a * k if isinstance(k, float) else times(a, k) for n, (a, k) in pairs.items()}
