"""What the outputs of a model say about targets: classes, independent classes or numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.analysis.laplace.links import LINKS, Link, Logits
from kfac_engine.engine.memory import require_gradient
from kfac_engine.errors import UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.observed import Targets


@dataclass(frozen=True, slots=True)
class Outputs:
    """The value that a loss reads.

    Attributes:
        curvature: The curvature of the model.
        loss: The loss.
    """

    curvature: Curvature
    loss: LossFunction

    @classmethod
    def of(cls, curvature: Curvature) -> "Outputs":
        """Return the outputs of a model with one loss.

        Raises:
            UnsupportedError: There are several losses, or the classes are not on the last axis.
        """
        terms = [t for loss in curvature.layout.assembly.task.objective.losses for t in loss.parts]
        if len(terms) > 1:
            raise UnsupportedError(
                f"predictions need one loss, but the curvature has {len(terms)}; measure the "
                f"curvature with the loss of one output."
            )
        loss = terms[0]
        (rank,) = {len(curvature.layout.assembly.model.facts[name].shape) for name in loss.inputs}
        if loss.class_axis not in (-1, rank - 1):
            raise UnsupportedError(
                f"the classes of '{loss.inputs[0]}' are on axis {loss.class_axis}; predictions "
                f"need them on the last axis."
            )
        return cls(curvature, loss)

    def probabilities(
        self, mean: Float, variance: Float, link: Link, samples: int, rng: np.random.Generator
    ) -> Float | None:
        """Return the probabilities of the classes; None for a loss without classes.

        Args:
            mean: ``(n, …, k)``.
            variance: Covariance of all outputs of each example, ``(n, K, K)``.
            link: How they become probabilities.
            samples: Number of samples.
            rng: Generator of the samples.

        Returns:
            Probabilities in the shape of ``mean``.
        """
        exclusive = isinstance(self.loss, CategoricalLogitsNegativeLogProbLoss)
        if not (exclusive or isinstance(self.loss, MultiBernoulliNegativeLogProbLoss)):
            return None
        k = mean.shape[-1] if mean.ndim > 1 else 1
        logits = Logits(mean.reshape(-1, k), _of_positions(variance, k), exclusive)
        return link(logits, samples, rng).reshape(mean.shape)

    def observed(self, inputs: Mapping[str, Array], targets: Targets) -> tuple[Array, Array | None]:
        """Return targets, and their weights, after a check against the outputs for some inputs.

        Raises:
            InputError: Inputs or targets are wrong.
            NonFiniteError: No target counts.
        """
        objective = self.curvature.layout.assembly.task.objective
        require_gradient(self.curvature.layout.assembly, inputs)
        trace = self.curvature.model.trace(inputs, targets)
        observation = objective.observe(trace)
        objective.weights(observation.whole)
        (seen,) = observation.terms
        values = {"targets": seen.targets, "weights": seen.weights}
        present = {name: array for name, array in values.items() if array is not None}
        arrays = self.curvature.on_host(present)
        return arrays["targets"], arrays.get("weights")

    def log_likelihood(
        self,
        mean: Float,
        variance: Float,
        observed: tuple[Array, Array | None],
        noise: float,
    ) -> float:
        """Return the mean log-likelihood of targets of the predictive distribution.

        Args:
            mean: ``(n, …, k)``.
            variance: ``(n, K, K)``.
            observed: Targets and their weights, of ``observed``.
            noise: Standard deviation of the targets of a normal loss.

        Raises:
            UnsupportedError: The loss is another one.
        """
        rng, (targets, weights) = np.random.default_rng(0), observed
        p = self.probabilities(mean, variance, LINKS["probit"], 1, rng)
        if p is None:
            if not isinstance(self.loss, NormalMeanNegativeLogProbLoss):
                raise UnsupportedError(
                    f"a Laplace approximation has no likelihood of the targets of "
                    f"{type(self.loss).__name__}; choose the prior by the evidence: leave "
                    f"validation out."
                )
            spread = np.diagonal(variance, axis1=1, axis2=2).reshape(mean.shape) + noise**2
            terms = -0.5 * ((targets - mean) ** 2 / spread + np.log(2 * np.pi * spread))
            return _mean(terms, weights)
        tiny = np.finfo(float).tiny
        if isinstance(self.loss, MultiBernoulliNegativeLogProbLoss):
            # Not 1 − p, which is zero for large logits.
            q = self.probabilities(-mean, variance, LINKS["probit"], 1, rng)
            assert q is not None
            terms = targets * np.log(p.clip(tiny)) + (1 - targets) * np.log(q.clip(tiny))
            return _mean(terms, weights)
        log_p = np.log(p.clip(tiny))
        if targets.ndim == p.ndim:  # rows of probabilities
            return _mean((targets * log_p).sum(axis=-1, keepdims=True), weights)
        return _mean(np.take_along_axis(log_p, targets[..., None], axis=-1), weights)


def _mean(terms: Float, weights: Array | None) -> float:
    """Return the mean of terms with weights that broadcast to them."""
    if weights is None:
        return float(terms.mean())
    return float(np.average(terms, weights=np.broadcast_to(weights, terms.shape)))


def _of_positions(variance: Float, k: int) -> Float:
    """Return the diagonal blocks ``(n · positions, k, k)`` of covariances ``(n, K, K)``."""
    n, size = variance.shape[:2]
    positions = size // k
    blocks = variance.reshape(n, positions, k, positions, k)
    each = np.arange(positions)
    return np.moveaxis(blocks[:, each, :, each, :], 0, 1).reshape(-1, k, k)
