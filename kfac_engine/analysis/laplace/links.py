"""Probabilities of classes from a normal distribution of the logits.

The logits ``z`` of a prediction have the mean ``μ`` and the covariance ``Σ``. The probabilities are
approximations of the mean of ``softmax(z)``, or of ``sigmoid(z)`` for independent targets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logsumexp, softmax

from kfac_engine.analysis.fisher_matrix.spectrum import Float
from kfac_engine.errors import UnsupportedError
from kfac_engine.registry import Registry


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Normal distributions of logits.

    Attributes:
        mean: ``(n, k)``.
        covariance: ``(n, k, k)``.
        exclusive: Whether one of the classes is right (softmax), or any number of them (sigmoid).
    """

    mean: Float
    covariance: Float
    exclusive: bool

    @property
    def variances(self) -> Float:
        """Diagonals of the covariances, ``(n, k)``."""
        return np.diagonal(self.covariance, axis1=1, axis2=2)

    def probabilities(self, z: Float) -> Float:
        """Return the softmax of logits ``(…, k)``, or the sigmoid for independent classes."""
        result: Float = softmax(z, axis=-1) if self.exclusive else expit(z)
        return result


# Logits, number of samples and generator to probabilities (n, k).
Link = Callable[[Logits, int, np.random.Generator], Float]


def _probit(logits: Logits, *_: object) -> Float:
    """Return ``softmax(μ / √(1 + π/8 diag Σ))`` (MacKay 1992; Gibbs 1997)."""
    return logits.probabilities(logits.mean / np.sqrt(1 + np.pi / 8 * logits.variances))


def _monte_carlo(logits: Logits, samples: int, generator: np.random.Generator) -> Float:
    """Return the mean of the probabilities of samples."""
    values, vectors = np.linalg.eigh(logits.covariance)
    root = vectors * np.sqrt(values.clip(min=0.0))[:, None]
    total = np.zeros_like(logits.mean)
    for _ in range(samples):
        noise = generator.standard_normal((*logits.mean.shape, 1))
        total += logits.probabilities(logits.mean + (root @ noise)[:, :, 0])
    return total / samples


def _bridge(logits: Logits, *_: object) -> Float:
    return _dirichlet_mean(logits, normalized=False)


def _bridge_norm(logits: Logits, *_: object) -> Float:
    return _dirichlet_mean(logits, normalized=True)


def _dirichlet_mean(logits: Logits, *, normalized: bool) -> Float:
    """Return the mean of the Dirichlet distribution of the Laplace bridge.

    The logits are conditioned on ``Σ_i z_i = 0``. With ``normalized``, mean and variances are
    divided so that the mean variance is ``√(k/2)`` (Hobbhahn, Kristiadi & Hennig 2022, "Fast
    predictive uncertainty for classification with Bayesian deep networks").

    Args:
        logits: The logits.
        normalized: Whether mean and variances are divided.

    Returns:
        Probabilities, ``(n, k)``.

    Raises:
        UnsupportedError: The classes are not exclusive.
    """
    if not logits.exclusive:
        raise UnsupportedError(
            "the links 'bridge' and 'bridge_norm' are defined for exclusive classes; use 'probit' "
            "or 'monte_carlo'."
        )
    k = logits.mean.shape[1]
    if k == 1:
        return np.ones_like(logits.mean)
    sums = logits.covariance.sum(axis=2)
    shares = sums / sums.sum(axis=1)[:, None]
    mean = logits.mean - shares * logits.mean.sum(axis=1, keepdims=True)
    variances = logits.variances - sums * shares
    # A difference below the rounding error of the variance is unknown.
    rounding = k * np.finfo(np.float64).eps * logits.variances
    variances = np.where(variances > rounding, variances, np.nan)
    if normalized:
        ratio = variances.mean(axis=1, keepdims=True) / np.sqrt(k / 2)
        mean, variances = mean / np.sqrt(ratio), variances / ratio
    # α = (1 − 2/k + exp(μ)/k² Σ exp(−μ)) / variances, in logarithms, which do not overflow.
    with np.errstate(divide="ignore"):  # 1 − 2/k is zero for two classes
        constant = np.log1p(-2 / k)
    powers = mean + logsumexp(-mean, axis=1, keepdims=True) - 2 * np.log(k)
    result: Float = softmax(np.logaddexp(constant, powers) - np.log(variances), axis=1)
    return result


LINKS: Mapping[str, Link] = Registry(
    "link",
    {
        "probit": _probit,
        "bridge": _bridge,
        "bridge_norm": _bridge_norm,
        "monte_carlo": _monte_carlo,
    },
)
