"""Derives the likelihood of a data set and its targets from a model's losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pi

import numpy as np

from kfac_engine._types import Array
from kfac_engine.analysis.fisher_matrix.blocks import Float
from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.analysis.laplace.predictive import LINKS, Link, LogitPrediction
from kfac_engine.engine.memory import require_gradient
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.bernoulli import MultiBernoulliNegativeLogProbLoss
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss
from kfac_engine.losses.observed import Targets


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The likelihood ``p(D|θ)^(1/T)`` of the data of a curvature at its parameters.

    A loss ``normal`` on means has the variance ``v`` in the file (½ by default). The noise ``σ``
    replaces it: the Fisher matrix is then multiplied by ``v/σ²``.
    """

    examples: int  # number ``n`` of examples
    log_likelihood: float | None  # ``Σ log p(y|x, θ)`` of the loss; None without targets
    temperature: float  # ``T > 0``
    variance: float | None = None  # ``v``; None for targets without noise
    predictions: float = 0  # number ``m`` of predicted means of all examples, each with its weight

    @classmethod
    def of(cls, curvature: Curvature, temperature: float) -> "Likelihood":
        """Return the likelihood of the data of a curvature, for a temperature ``T > 0``.

        A loss with a weight other than 1 raises an UnsupportedError.
        """
        losses = curvature.layout.assembly.task.objective.losses
        for loss in losses:
            if loss.coefficient != 1:
                raise UnsupportedError(
                    f"the loss '{loss.name}' has the weight {loss.coefficient:g}, so it is not a "
                    f"likelihood; measure the curvature without this weight, and give a "
                    f"temperature instead."
                )
        terms = [loss.function for loss in losses]
        variances = {t.var for t in terms if isinstance(t, NormalMeanNegativeLogProbLoss)}
        all_normal = all(isinstance(t, NormalMeanNegativeLogProbLoss) for t in terms)
        variance = variances.pop() if all_normal and len(variances) == 1 else None
        return cls(
            curvature.examples,
            curvature.log_likelihood,
            temperature,
            variance,
            curvature.predictions,
        )

    def checked_noise(self, noise: float) -> float:
        """Return a noise after a check; an InputError if the targets have none."""
        if self.variance is None and noise != 1.0:
            raise InputError(
                f"noise is {noise:g}, but only a normal loss with one variance has a noise, the "
                f"standard deviation of its targets; leave noise out."
            )
        return noise

    def scale(self, noise: float) -> float:
        """Return the factor from the mean Fisher matrix to the Hessian of ``−log p(D|θ)^(1/T)``."""
        with np.errstate(over="ignore", divide="ignore"):
            ratio = 1.0 if self.variance is None else self.variance / np.square(noise)
            return float(self.examples * np.float64(ratio) / self.temperature)

    def squared_errors(self) -> float:
        """Return the sum of the squared errors of a normal loss."""
        assert self.variance is not None, "other losses have no squared errors"
        constant = 0.5 * self.predictions * log(2 * pi * self.variance)
        return -2 * self.variance * (self._value() + constant)

    def value(self, noise: float) -> float:
        """Return ``log p(D|θ) / T`` for a standard deviation of the targets.

        A curvature that was measured without targets raises an InputError.
        """
        if self.variance is None:
            return float(np.float64(self._value()) / self.temperature)
        constant = 0.5 * self.predictions * (log(2 * pi) + 2 * log(noise))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            misfit = self.squared_errors() / (2 * np.square(noise))
            return float(-(misfit + constant) / self.temperature)

    def _value(self) -> float:
        if self.log_likelihood is None:
            raise InputError(
                "the evidence needs the likelihood of the targets, but the curvature was measured "
                "without targets; pass them with the inputs."
            )
        return self.log_likelihood


@dataclass(frozen=True, slots=True)
class Outputs:
    """The value that a loss reads."""

    curvature: Curvature  # the curvature of the model
    loss: LossFunction

    @classmethod
    def of(cls, curvature: Curvature) -> "Outputs":
        """Return the outputs of a model with one loss, whose classes are on the last axis.

        Another model raises an UnsupportedError.
        """
        terms = curvature.layout.assembly.task.objective.terms
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

        ``mean`` is ``(n, …, k)``, as the result, and ``variance`` the covariance of all outputs of
        each example, ``(n, K, K)``. ``rng`` draws ``samples``, if the link has any.
        """
        exclusive = isinstance(self.loss, CategoricalLogitsNegativeLogProbLoss)
        if not (exclusive or isinstance(self.loss, MultiBernoulliNegativeLogProbLoss)):
            return None
        k = mean.shape[-1] if mean.ndim > 1 else 1
        logits = LogitPrediction(mean.reshape(-1, k), _of_positions(variance, k), exclusive)
        return link(logits, samples, rng).reshape(mean.shape)

    def observed(self, inputs: Mapping[str, Array], targets: Targets) -> tuple[Array, Array | None]:
        """Return targets, and their weights, after a check against the outputs for some inputs.

        A NonFiniteError is raised if no target counts.
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
        self, mean: Float, variance: Float, observed: tuple[Array, Array | None], noise: float
    ) -> float:
        """Return the mean log-likelihood of targets of the predictive distribution.

        ``mean`` is ``(n, …, k)`` and ``variance`` is ``(n, K, K)``. ``observed`` has the targets
        and their weights. ``noise`` is the standard deviation of the targets of a normal loss.
        Other losses raise an UnsupportedError.
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
