"""Computes the evidence of a Laplace approximation, and maximizes it over prior and noise.

For a prior N(0, P₀⁻¹) and the posterior precision ``P = hF + P₀``,

    log p(D) ≈ log p(D|θ) − ½ (log det P − log det P₀ + θᵀ P₀ θ)

(MacKay 1992, "A practical Bayesian framework for backpropagation networks"). ``P₀`` has one number
λ for each group of parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt

import numpy as np
from scipy.optimize import minimize

from kfac_engine.analysis.fisher_matrix.blocks import Float
from kfac_engine.analysis.fisher_matrix.curvature import Curvature
from kfac_engine.analysis.laplace.likelihood import Likelihood
from kfac_engine.distributed.owners import together
from kfac_engine.errors import InputError

Prior = float | Mapping[str, float]

# Bounds of a prior precision and of a noise, and the precisions where the search starts.
_LOWEST, _HIGHEST = 1e-12, 1e15
_STARTS = np.logspace(-4, 6, 11)
# Number of factors of a product whose logarithm is taken.
_FACTORS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroup:
    """Parameters with one prior precision."""

    parameters: tuple[str, ...]  # their names
    eigenvalues: Float  # eigenvalues of their blocks of the mean Fisher matrix
    square: float  # sum of the squares of the parameters

    def value(self, scale: float, precision: float) -> float:
        """Return the term of the evidence, ``−½ (Σ log(1 + hs/λ) + λ Σ θ²)``."""
        logarithms = _sum_of_log1p(self.eigenvalues * (scale / precision))
        return -0.5 * (logarithms + precision * self.square)

    def derivatives(self, scale: float, precision: float) -> tuple[float, float, float]:
        """Return the term of the evidence and its derivatives, for ``scale`` h, ``precision`` λ.

        The results are ``−½ (Σ log(1 + hs/λ) + λ Σ θ²)``, its derivative with respect to log λ, and
        the sum of ``hs/(hs + λ)``, the number of parameters that the data determine.
        """
        curved = scale * self.eigenvalues
        determined = float((curved / (curved + precision)).sum())
        penalty = precision * self.square
        term = -0.5 * (float(np.log1p(curved / precision).sum()) + penalty)
        return term, 0.5 * (determined - penalty), determined


@dataclass(frozen=True, slots=True, eq=False)
class MarginalLikelihood:
    """The evidence as a function of prior and noise."""

    likelihood: Likelihood  # the likelihood at the parameters
    groups: tuple[ParameterGroup, ...]  # all parameters, divided into groups

    @classmethod
    def of(cls, curvature: Curvature, likelihood: Likelihood, prior: Prior) -> "MarginalLikelihood":
        """Return the evidence of a curvature.

        A prior that is a number has one group, a mapping has a group for each block.
        """
        parts = [(block, part) for block in curvature.blocks for part in block.parts]
        # Parts that share a parameter have one precision.
        numbers = [[*range(len(parts))]]
        if isinstance(prior, Mapping):
            numbers = together({i: part.parameters for i, (_, part) in enumerate(parts)})
        squares = {
            n: float(np.sum(np.square(a, dtype=float))) for n, a in curvature.parameters.items()
        }
        groups = []
        for group in ([parts[i] for i in members] for members in numbers):
            names = tuple(dict.fromkeys(name for _, part in group for name in part.parameters))
            rows = [block.spectrum.eigenvalues[:, part.rows].ravel() for block, part in group]
            groups.append(
                ParameterGroup(names, np.concatenate(rows), sum(squares[n] for n in names))
            )
        return cls(likelihood, tuple(groups))

    def value(self, prior: Prior, noise: float) -> float:
        """Return the evidence of λ, or λ of each parameter, and the deviation of the targets.

        A curvature that was measured without targets raises an InputError.
        """
        scale = self.likelihood.scale(noise)
        terms = (group.value(scale, precision_of(group, prior)) for group in self.groups)
        return self.likelihood.value(noise) + sum(terms)

    def maximum(self, noise: float, *, fit_noise: bool) -> tuple[list[float], float]:
        """Return λ of each group and the noise with the largest evidence.

        ``noise`` is the noise, or with ``fit_noise`` where its search starts. An InputError says
        that the evidence has no maximum, because all parameters, all eigenvalues or all errors are
        zero, or that the curvature was measured without targets.
        """
        self.likelihood.value(noise)
        self._require_maximum(fit_noise=fit_noise)
        size = len(self.groups)

        def negative(logs: Float) -> tuple[float, Float]:
            deviation = exp(logs[size]) if fit_noise else noise
            scale = self.likelihood.scale(deviation)
            gradient, total, determined = np.zeros_like(logs), self.likelihood.value(deviation), 0.0
            for index, group in enumerate(self.groups):
                term, gradient[index], count = group.derivatives(scale, exp(logs[index]))
                total, determined = total + term, determined + count
            if fit_noise:
                errors = self.likelihood.squared_errors() / deviation**2
                rest = (errors - self.likelihood.predictions) / self.likelihood.temperature
                gradient[size] = rest + determined
            return -total, -gradient

        start_noise = [log(self._residual_noise())] if fit_noise else []
        start = min(
            (np.array([log(number)] * size + start_noise) for number in _STARTS),
            key=lambda logs: negative(logs)[0],
        )
        bounds = [(log(_LOWEST), log(_HIGHEST))] * len(start)
        best = minimize(
            negative, start, jac=True, method="L-BFGS-B", bounds=bounds,
            options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000},
        )  # fmt: skip
        values = np.exp(best.x).tolist()
        return values[:size], values[size] if fit_noise else noise

    def _residual_noise(self) -> float:
        """Return the root of the mean squared error, where the search for the noise starts."""
        mean = self.likelihood.squared_errors() / max(self.likelihood.predictions, 1)
        return min(max(sqrt(max(mean, 0.0)), 1e-6), 1e6)

    def _require_maximum(self, *, fit_noise: bool) -> None:
        """Raise an InputError if the evidence grows without end in one direction."""
        for group in self.groups:
            names = ", ".join(group.parameters)
            if group.square == 0:
                raise InputError(
                    f"the evidence has no maximum: all entries of {names} are zero, so the "
                    f"evidence grows with their prior precision; give the precision as a number."
                )
            if not group.eigenvalues.any():
                raise InputError(
                    f"the evidence has no maximum: the loss does not depend on {names}, so the "
                    f"evidence grows as their prior precision falls; give it as a number."
                )
        if fit_noise and self.likelihood.squared_errors() <= 0:
            raise InputError(
                "the evidence has no maximum: the model predicts these targets exactly, so the "
                "evidence grows as the noise falls; give the noise as a number."
            )


def _sum_of_log1p(values: Float) -> float:
    """Return ``Σ log(1 + v)`` of numbers that are not negative.

    Logarithms take most of the time, so one logarithm serves the product of sixteen numbers.
    """
    whole = len(values) // _FACTORS * _FACTORS
    factors = values + 1.0
    with np.errstate(over="ignore"):
        products = np.multiply.reduce(factors[:whole].reshape(_FACTORS, -1), axis=0)
    total = float(np.log(products).sum() + np.log(factors[whole:]).sum())
    return total if isfinite(total) else float(np.log1p(values).sum())


def precision_of(group: ParameterGroup, prior: Prior) -> float:
    """Return the prior precision of a group."""
    return prior[group.parameters[0]] if isinstance(prior, Mapping) else prior
