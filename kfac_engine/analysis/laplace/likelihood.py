"""The likelihood of a data set as a function of the noise of its targets."""

from dataclasses import dataclass
from math import log, pi

import numpy as np

from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.losses.normal import NormalMeanNegativeLogProbLoss


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The likelihood ``p(D|θ)^(1/T)`` of the data of a curvature at its parameters.

    A loss ``normal`` on means has the variance ``v`` in the file (½ by default). The noise ``σ``
    replaces it: the Fisher matrix is then multiplied by ``v/σ²``.

    Attributes:
        examples: Number ``n`` of examples.
        log_likelihood: ``Σ log p(y|x, θ)`` of the loss; None without targets.
        temperature: ``T > 0``.
        variance: ``v``; None for targets without noise.
        predictions: Number ``m`` of predicted means of all examples, each with its weight.
    """

    examples: int
    log_likelihood: float | None
    temperature: float
    variance: float | None = None
    predictions: float = 0

    @classmethod
    def of(cls, curvature: Curvature, temperature: float) -> "Likelihood":
        """Return the likelihood of the data of a curvature.

        Args:
            curvature: The curvature.
            temperature: ``T > 0``.

        Raises:
            UnsupportedError: A loss has a weight other than 1.
        """
        losses = curvature.layout.assembly.task.objective.losses
        for loss in losses:
            if loss.coefficient != 1:
                raise UnsupportedError(
                    f"the loss '{loss.name}' has the weight {loss.coefficient:g}, so that it is no "
                    f"likelihood; measure the curvature without loss_weights, and give a "
                    f"temperature instead."
                )
        terms = [term for loss in losses for term in loss.parts]
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
                f"noise is the standard deviation of the targets of a normal loss with one "
                f"variance, which this curvature does not have, got {noise:g}; leave it out."
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
        """Return ``log p(D|θ) / T``.

        Args:
            noise: Standard deviation of the targets.

        Raises:
            InputError: The curvature was measured without targets.
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
