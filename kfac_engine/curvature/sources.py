"""Collects the values that factors read: activations, and gradients for each source of a mode.

If targets have weights, the values include the weights of the rows that factors measure.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import recordable
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.estimation_modes import MODES, Draws, EstimationMode
from kfac_engine.curvature.factors.base import FisherFactor, named_arrays
from kfac_engine.curvature.factors.readers import Readers
from kfac_engine.curvature.factors.row_weights import ExamplePlaces, ExampleWeights, LayerRows
from kfac_engine.distributed.shards import AnyGenerator, DrawAxis, RowGenerator, RowRange
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
    checked: bool = False  # whether the losses have checked what they read


@dataclass(eq=False)
class Sources:
    """Propagates the sources of an estimation mode to the values that factors read."""

    mode: EstimationMode  # computes the cotangents of the sources
    losses: tuple[RegisteredLoss, ...]  # the losses
    backend: Backend  # array library of the factors
    rng: np.random.Generator  # generator of sampled targets and random signs; advanced by each pass
    # The differentiated value of each gradient, by the name that factors read.
    gradients: Mapping[str, str]
    # The layers. Weights of targets decide which rows of their inputs count.
    layers: tuple[LayerRows, ...]
    # Computes gradients of single examples; None if traces cannot.
    examples: ExampleGradients | None
    variables: tuple[str, ...]  # parameters whose gradients are summed over the sources
    rows: RowRange | None = None  # the rows that this process has; None for the whole batch
    # Those among the examples of each loss, by its name, where losses have examples of their own.
    rows_of: Mapping[str, RowRange] = field(default_factory=dict)
    # Returns the place of the examples in the draws of each loss, by name; the first axis where
    # absent.
    placements: Callable[[], Mapping[str, DrawAxis]] = dict
    places: ExamplePlaces = field(default_factory=ExamplePlaces)  # where values have the examples
    # Name of a value whose first axis has the examples only; empty if the first axis of the first
    # loss input has them.
    batch: str = ""
    # Returns the values that each loss function depends on, in the order of the losses.
    reached: Callable[[], Sequence[Collection[str]]] = tuple
    _numbers: dict[FisherFactor, frozenset[int]] = field(default_factory=dict, init=False)

    def batch_of(
        self, trace: Trace, draws: Draws | None = None, scales: Scales | None = None
    ) -> MeasuredBatch:
        """Return a batch to measure; by default, weights of predictions give its scales."""
        if scales is not None:
            return MeasuredBatch(trace, scales, None, draws)
        return MeasuredBatch(trace, self.scales_of(trace), self._weights_of(trace), draws)

    def scales_of(self, trace: Trace) -> dict[str, Array]:
        """Return the roots of the weights of the predictions that the losses read."""
        terms = [loss.function for loss in self.losses]
        weights = {name: t.row_weights(trace) for t in terms for name in t.inputs}
        return {name: root(rows) for name, rows in weights.items() if rows is not None}

    def losses_of(self, factors: Sequence[FisherFactor]) -> Mapping[FisherFactor, frozenset[int]]:
        """Return the numbers of the loss functions from which the gradients of each factor come.

        ``factors`` are all factors. A factor of inputs has the numbers of its layers. There are
        none where they are not known.
        """
        reached = self.reached() if not self._numbers else ()
        for factor in factors if not self._numbers else ():
            names = {*factor.names()}
            values = {self.gradients[name] for name in names if name in self.gradients}
            layers = (layer for layer in self.layers if not names.isdisjoint(layer.inputs))
            values = values or values.union(*(layer.outputs for layer in layers))
            numbers = (i for i, its in enumerate(reached) if not values.isdisjoint(its))
            self._numbers[factor] = frozenset(numbers)
        return self._numbers

    def of_examples(self, readers: Readers, batch: MeasuredBatch) -> Iterator[dict[str, Array]]:
        """Yield the values of single examples that factors read, for each source."""
        assert self.examples is not None, "factors read gradients of single examples"
        forward = named_arrays(batch.trace, readers.forward, self.backend)
        names = tuple(readers.gradients.values())
        for cotangents in self._cotangents(batch):
            for gradients in self.examples(batch.trace, cotangents, names):
                arrays = named_arrays(gradients, names, self.backend)
                yield forward | {n: arrays[value] for n, value in readers.gradients.items()}

    def of_batch(
        self, readers: Readers, batch: MeasuredBatch, stats: dict[str, Array]
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of a batch that factors read, by name, once for each source.

        No other reference to a gradient remains. ``stats`` receives the sum of the gradients of
        each variable over sources.
        """
        differentiated, backend = readers.gradients, self.backend
        trace, weights = batch.trace, batch.weights
        forward = named_arrays(trace, readers.forward, backend)
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
            gradients = named_arrays(trace.vjp(cotangents, wrt), wrt, backend) if wrt else {}
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

    def given(
        self, readers: Readers, batch: MeasuredBatch, propagated: dict[str, Array]
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of the only source of a mode, from gradients that exist already."""
        differentiated = readers.gradients
        values = named_arrays(batch.trace, readers.forward, self.backend)
        arrays = named_arrays(propagated, differentiated.values(), self.backend)
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
        cotangents = times_scales(source, batch.scales)
        several = [cotangents, *([weights.times_roots(cotangents)] if weights.by_ratio else ())]
        gradients, *weighted = (
            named_arrays(batch.trace.vjp(each, outputs), outputs, self.backend) for each in several
        )
        return weights.of_rows(layers, gradients, self.backend, *weighted)

    def _weights_of(self, trace: Trace) -> ExampleWeights | None:
        """Return the weights of the examples of a batch, from the values that the losses read."""
        terms = [loss.function for loss in self.losses]
        rows = [(term, term.row_weights(trace)) for term in terms]
        examples = len(trace[self.batch or terms[0].inputs[0]])
        return ExampleWeights.of(rows, trace, examples, self.places)

    def _cotangents(self, batch: MeasuredBatch) -> Iterator[dict[str, Array]]:
        rng: AnyGenerator = self.rng
        if self.rows is not None:
            rng = RowGenerator(self.rng, self.rows, self.placements(), rows_of=self.rows_of)
        known = batch.checked and not batch.draws and self.mode.mat_type != "GGN"
        sources = self.mode.sources if known else self.mode
        values: Any = batch.trace  # a mapping, if it was checked
        for source in sources(self.losses, values, rng, batch.draws or {}):
            yield times_scales(source, batch.scales)


@recordable
def times_scales(source: Mapping[str, Array], scales: Scales) -> dict[str, Array]:
    """Return each cotangent times the scale of its loss input; a missing scale counts as 1."""
    cotangents: dict[str, Array] = {}
    for name, array in source.items():
        scale = scales.get(name, 1.0)
        cotangents[name] = array * scale if isinstance(scale, float) else times(array, scale)
    return cotangents
