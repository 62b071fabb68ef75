"""The values of a batch that factors read: activations, and gradients of each source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.estimation_modes import Draws, EstimationMode
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.updater import Measured, computed
from kfac_engine.curvature.factors.values import take
from kfac_engine.losses.base import RegisteredLoss


class Trace(Protocol):
    """One evaluation of a model, from an ONNX file or from other code."""

    def __getitem__(self, name: str, /) -> Array:
        """Return a value by name: an activation, a loss input or targets."""

    def vjp(self, cotangents: Mapping[str, Array], wrt: Sequence[str]) -> Mapping[str, Array]:
        """Return gradients of ``Σ ⟨cotangent, value⟩`` with respect to ``wrt``, by name."""


ExampleGradients: TypeAlias = Callable[
    [Any, Mapping[str, Array], Sequence[str]], Iterator[Mapping[str, Array]]
]


@dataclass(slots=True)
class Sources:
    """Propagates the sources of an estimation mode back to the values that factors read.

    Attributes:
        mode: Computes the cotangents of the sources.
        losses: The losses, with their towers.
        backend: Array library of the factors.
        rng: Generator of sampled targets and random signs; advanced by each pass.
        examples: Computes gradients of single examples; None if traces cannot.
        variables: Parameters whose gradients are summed over the sources.
        gradients: Name of a gradient, as factors read it, to the differentiated value.
        alone: Factors whose statistics read gradients of single examples.
    """

    mode: EstimationMode
    losses: tuple[RegisteredLoss, ...]
    backend: Backend
    rng: np.random.Generator
    examples: ExampleGradients | None = None
    variables: tuple[str, ...] = ()
    gradients: dict[str, str] = field(default_factory=dict)
    alone: tuple[FisherFactor, ...] = ()

    def gradient_name(self, value: str) -> str:
        """Register the gradient with respect to a value, and return its name."""
        name = f"∂{value}"
        self.gradients[name] = value
        return name

    @property
    def of_examples(self) -> tuple[str, ...]:
        """Values with respect to which the losses of single examples are differentiated."""
        return tuple(self.gradients[name] for f in self.alone for name in f.statistic.names())

    @property
    def of_batches(self) -> tuple[str, ...]:
        """Values with respect to which the losses of a whole batch are differentiated."""
        alone = frozenset(self.of_examples)
        return tuple(v for v in dict.fromkeys(self.gradients.values()) if v not in alone)

    def of_batch(
        self,
        factors: Sequence[FisherFactor],
        trace: Trace,
        draws: Draws | None,
        scales: Mapping[str, float],
        stats: dict[str, Array],
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of a batch that factors read, once for each source.

        Args:
            factors: The factors.
            trace: The batch.
            draws: Fixes the randomness, by loss name.
            scales: Loss input to the factor of its cotangents; 1 where absent.
            stats: Variable to the sum of its gradients over sources; changed.

        Yields:
            Name to array; no other reference to a gradient remains.
        """
        forward, wanted = self._forward(factors, trace)
        backend = self.backend
        wrt = tuple(dict.fromkeys((*wanted.values(), *self.variables)))
        for cotangents in self._cotangents(trace, draws, scales):
            gradients = take(trace.vjp(cotangents, wrt), wrt, backend) if wrt else {}
            for name in self.variables:
                gradient = gradients[name]
                stats[name] = stats[name] + gradient if name in stats else gradient
            values = forward | {name: gradients[value] for name, value in wanted.items()}
            if self.mode.one_source:
                forward.clear()
            del gradients, cotangents
            yield values

    def _cotangents(
        self, trace: Trace, draws: Draws | None, scales: Mapping[str, float]
    ) -> Iterator[dict[str, Array]]:
        for source in self.mode(self.losses, trace, self.rng, draws):
            yield {name: scales.get(name, 1.0) * array for name, array in source.items()}

    def measure_examples(
        self,
        factors: Sequence[FisherFactor],
        trace: Trace,
        draws: Draws | None,
        scales: Mapping[str, float],
    ) -> list[Measured]:
        """Measure the sum over sources and examples; averages and the generator do not change.

        Args:
            factors: Some of ``alone``.
            trace: The batch.
            draws: Fixes the randomness, by loss name.
            scales: Loss input to the factor of its cotangents; 1 where absent.

        Returns:
            The factors with their measurements.
        """
        if not factors or self.examples is None:
            return []
        generator, backend = self.rng.bit_generator.state, self.backend
        forward, wanted = self._forward(factors, trace)
        names = tuple(wanted.values())
        measured: list[Measured] = []
        try:
            for cotangents in self._cotangents(trace, draws, scales):
                for gradients in self.examples(trace, cotangents, names):
                    arrays = take(gradients, names, backend)
                    values = forward | {name: arrays[value] for name, value in wanted.items()}
                    for factor in factors:
                        factor.check(values)
                    for _, measurement in measured:
                        measurement.add(values)
                    measured = measured or [(f, computed(f, values)) for f in factors]
        finally:
            self.rng.bit_generator.state = generator
        return measured

    def given(
        self, factors: Sequence[FisherFactor], trace: Trace, propagated: dict[str, Array]
    ) -> Iterator[dict[str, Array]]:
        """Yield the values of the only source of a mode, from gradients that exist already."""
        forward, wanted = self._forward(factors, trace)
        arrays = take(propagated, wanted.values(), self.backend)
        propagated.clear()
        forward.update((name, arrays.pop(value)) for name, value in wanted.items())
        yield forward

    def _forward(
        self, factors: Sequence[FisherFactor], trace: Trace
    ) -> tuple[dict[str, Array], dict[str, str]]:
        """Return the forward values that factors read, and the gradients they read with values."""
        statistics = [factor.statistic for factor in factors]
        reads = dict.fromkeys(name for s in statistics for name in (*s.names(), *s.lengths()))
        wanted = {name: value for name, value in self.gradients.items() if name in reads}
        left = (name for name in reads if name not in wanted)
        return take(trace, left, self.backend), wanted


@dataclass(slots=True)
class ThunkRound:
    """One pass of the covariance thunks over a batch, in which all thunks see the same draws.

    Attributes:
        trace: The batch.
        generator: State of the random generator from which each thunk draws.
        done: ``id`` of each factor that was updated; changed by the thunks.
    """

    trace: Trace
    generator: Mapping[str, object]
    done: set[int] = field(default_factory=set)

    def includes(self, trace: Trace, factor: FisherFactor) -> bool:
        """Return whether an update belongs to this pass; a second update begins a new pass."""
        return trace is self.trace and id(factor) not in self.done
