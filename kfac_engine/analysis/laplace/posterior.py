"""Approximates the posterior distribution of a model's parameters (Laplace approximation)."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array, Params
from kfac_engine.analysis.fisher_matrix.blocks import Block, Float, checked_damping
from kfac_engine.analysis.fisher_matrix.curvature import Curvature, checked_curvature
from kfac_engine.analysis.laplace.evidence import MarginalLikelihood, Prior
from kfac_engine.analysis.laplace.export import export_variance
from kfac_engine.analysis.laplace.likelihood import Likelihood, Outputs
from kfac_engine.analysis.laplace.predictive import LINKS, Linearization, Predictive
from kfac_engine.arguments import check_bool, check_int, check_positive, check_seed
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.datasets.forms import Data, whole_batch
from kfac_engine.engine.rollback import ignore_overflow
from kfac_engine.errors import InputError
from kfac_engine.losses.observed import Targets

# Prior precisions among which a validation chooses, and the number of values of the second round.
_PRECISIONS, _REFINED = np.logspace(-4, 6, 21), 9


class Laplace:
    """The normal distribution of the parameters with the mean θ and the precision ``P = hF + P₀``.

    ``F`` is the mean Fisher matrix of ``n`` examples, ``h = n/T`` for the temperature ``T``, and
    ``P₀`` the precision of the prior, whose mean is zero (MacKay 1992; Daxberger et al. 2021,
    "Laplace redux"). For a loss ``normal`` with the variance ``v`` and targets with the standard
    deviation σ, ``h = n v/(σ² T)``.

    Args:
        curvature: The curvature at the parameters θ of a trained model.
        prior_precision: λ > 0, the reciprocal of the prior variance of a parameter, or λ of each
            parameter.
        noise: σ > 0, for a loss ``normal`` only.
        temperature: T > 0. The likelihood is ``p(D|θ)^(1/T)``.

    Attributes:
        curvature: The curvature.
        prior_precision: λ, or λ of each parameter.
        noise: σ.
        temperature: T.

    Raises:
        InputError: An argument is not positive, the noise does not fit the loss, or parameters of
            one block have different precisions.
        UnknownNameError: A name is not a parameter.
        UnsupportedError: A loss has a weight other than 1.
    """

    def __init__(
        self,
        curvature: Curvature,
        prior_precision: Prior = 1.0,
        noise: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        self.curvature = checked_curvature(curvature, "a Laplace approximation")
        check_positive("temperature", temperature)
        self.temperature = temperature
        self._likelihood = Likelihood.of(curvature, self.temperature)
        self.prior_precision = self._checked_prior(prior_precision)
        self.noise = self._checked_noise(noise)
        self._evidences: dict[bool, MarginalLikelihood] = {}

    def __repr__(self) -> str:
        """Return the prior, and the noise of a normal loss."""
        prior = self.prior_precision
        spelled = f"{len(prior)} numbers" if isinstance(prior, Mapping) else f"{prior:.4g}"
        noise = "" if self._likelihood.variance is None else f", noise {self.noise:.4g}"
        return f"Laplace({self.curvature!r}, prior_precision {spelled}{noise})"

    # -- posterior --------------------------------------------------------------------------------

    def eigenvalues(self) -> dict[Params, Array]:
        """Return the eigenvalues of each block of the posterior precision ``P``, ascending.

        Returns:
            Eigenvalues in float64, by the parameters of a block: a name or a tuple of names.
        """
        return {
            part.key: np.sort(self._precisions(block)[:, part.rows], axis=None)
            for block in self.curvature.blocks
            for part in block.parts
        }

    def log_determinant(self) -> float:
        """Return ``log det P``: up to a constant, −2 times the entropy of the posterior."""
        return float(sum(np.log(self._precisions(block)).sum() for block in self.curvature.blocks))

    def sample(self, count: int, seed: int = 0) -> dict[str, Array]:
        """Return samples of the parameters.

        Args:
            count: Number of samples.
            seed: Seed of the generator.

        Returns:
            Arrays ``(count, *shape)`` in float64, by parameter name; a sample can be given to
            ``set_parameters``.

        Raises:
            InputError: An argument is not a whole number.
        """
        check_int("count", count, least=1)
        check_seed(seed)
        vector, generator = self.curvature.vector, np.random.default_rng(seed)
        rows = np.empty((count, vector.size))
        for block in self.curvature.blocks:
            noise = generator.standard_normal((count, *block.places.shape))
            rows[:, block.places] = block.spectrum.back(self._precisions(block) ** -0.5 * noise)
        mean, _ = vector.join(self.curvature.parameters)
        names = tuple(vector.shapes)
        return vector.split(rows + mean, names, dict.fromkeys(names, np.dtype(float)), True)

    # -- evidence ---------------------------------------------------------------------------------

    def log_marginal_likelihood(
        self, prior_precision: Prior | None = None, noise: float | None = None
    ) -> float:
        """Return the logarithm of the evidence ``p(D)``, in nats.

        ``log p(D) ≈ log p(D|θ)/T − ½ (log det P − log det P₀ + θᵀ P₀ θ)``.

        Args:
            prior_precision: λ, or λ of each parameter; by default λ of the posterior.
            noise: σ; by default σ of the posterior.

        Returns:
            The evidence; the posterior does not change.

        Raises:
            InputError: The curvature was measured without targets, or an argument is wrong.
        """
        chosen = self.prior_precision if prior_precision is None else prior_precision
        prior = self._checked_prior(chosen)
        deviation = self.noise if noise is None else self._checked_noise(noise)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            value = self._evidence(prior).value(prior, deviation)
        if not isfinite(value):
            raise InputError(
                f"the evidence overflows float64 for prior_precision {prior}, noise "
                f"{deviation:g} and temperature {self.temperature:g}; give numbers nearer to 1."
            )
        return value

    def fit_prior(self, noise: bool = False, validation: Data | None = None) -> "Laplace":
        """Choose the prior precision, and change the posterior.

        By default the choice maximizes the evidence. If ``prior_precision`` is a mapping, a
        precision is chosen for each block.

        Args:
            noise: Whether to choose the noise, too, for a loss ``normal``; not with
                ``validation``.
            validation: Data as for ``fit`` that the model was not trained on. The choice is
                then one precision between 1e-4 and 1e6 that maximizes the log-likelihood of these
                targets by the link ``"probit"``.

        Returns:
            The posterior itself.

        Raises:
            InputError: The evidence has no maximum, the curvature was measured without targets, or
                the arguments contradict each other.
        """
        check_bool("noise", noise)
        if validation is not None:
            if noise:
                raise InputError(
                    "only the evidence can choose the noise; leave validation out, or noise=True."
                )
            self.prior_precision = self._validated(
                *whole_batch(validation, self.curvature.model.example_axes)
            )
            return self
        if noise and self._likelihood.variance is None:
            raise InputError("only targets of a normal loss have a noise; leave noise=True out.")
        evidence = self._evidence(self.prior_precision)
        precisions, self.noise = evidence.maximum(self.noise, fit_noise=noise)
        if isinstance(self.prior_precision, Mapping):
            self.prior_precision = {
                name: precision
                for group, precision in zip(evidence.groups, precisions, strict=True)
                for name in group.parameters
            }
        else:
            self.prior_precision = precisions[0]
        return self

    # -- predictions ------------------------------------------------------------------------------

    def predict(
        self,
        inputs: Data,
        link: str = "probit",
        *,
        joint: bool = False,
        samples: int = 1000,
        seed: int = 0,
    ) -> Predictive:
        """Predict, with the uncertainty that the parameters cause.

        The model is linearized at θ. For a loss ``normal``, the targets have the covariance
        ``variance + σ² I``.

        Args:
            inputs: Arrays by input name, or data in another form of ``Engine.predict``.
            link: How means and variances of logits become probabilities: ``"probit"``,
                ``"bridge"``, ``"bridge_norm"`` or ``"monte_carlo"``.
            joint: Whether to return the covariance of the outputs of all examples, too.
            samples: Number of samples of ``"monte_carlo"``.
            seed: Seed of ``"monte_carlo"``.

        Returns:
            Mean, covariance of each example, and probabilities.

        Raises:
            InputError: The inputs or arguments are wrong.
            UnknownNameError: There is no such link.
            UnsupportedError: The losses read several values, or the link does not fit the loss.
            MemoryLimitError: The joint covariance does not fit into the memory.
        """
        function = LINKS[link]
        check_bool("joint", joint)
        check_int("samples", samples, least=1)
        check_seed(seed)
        outputs, linear = Outputs.of(self.curvature), Linearization(self.curvature)
        arrays, _ = whole_batch(inputs, self.curvature.model.example_axes, labeled=False)
        powers = self._powers(self.prior_precision)
        with single_threaded_blas(), ignore_overflow():
            mean, (variance,) = linear.variances(arrays, [powers])
            covariance = linear.covariance(arrays, powers) if joint else None
            generator = np.random.default_rng(seed)
            probabilities = outputs.probabilities(mean, variance, function, samples, generator)
        result = Predictive(mean, variance, probabilities, covariance)
        result.check()
        return result

    def export(self, path: str | Path) -> None:
        """Write the model with one more output, ``variance``, which any runtime computes.

        The output is ``Predictive.variance``, ``(n, k, k)``, under an uncertain last dense layer,
        in a few operators of the ONNX standard. The curvature covers this layer only
        (``layers="last"``).

        Args:
            path: File to write.

        Raises:
            UnsupportedError: The curvature covers other parameters than those of a last dense layer
                that computes what the loss reads.
            InputError: The path is wrong, or the model has a value ``variance``.
        """
        blocks = [(block, 1 / self._precisions(block)) for block in self.curvature.blocks]
        export_variance(self.curvature.layout, blocks, path)

    # -- private ----------------------------------------------------------------------------------

    def _precisions(self, block: Block, prior: Prior | None = None) -> Float:
        """Return the eigenvalues of a block of ``P``, ``(g, d_in, d_out)``."""
        levels = block.levels(self.prior_precision if prior is None else prior)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scaled = self._likelihood.scale(self.noise) * block.spectrum.eigenvalues
            precisions: Float = scaled + levels
            if np.isfinite(precisions).all() and np.isfinite(1 / precisions).all():
                return precisions
        raise InputError(
            f"the posterior of {', '.join(block.parameters)} has precisions or variances that "
            f"overflow float64 for prior_precision {levels.min():g} to "
            f"{levels.max():g}, noise {self.noise:g} and temperature {self.temperature:g}; give "
            f"numbers nearer to 1."
        )

    def _powers(self, prior: Prior) -> dict[int, Float]:
        return {id(block): 1 / self._precisions(block, prior) for block in self.curvature.blocks}

    def _evidence(self, prior: Prior) -> MarginalLikelihood:
        """Return the evidence for a prior with one number, or with one for each parameter."""
        several = isinstance(prior, Mapping)
        if several not in self._evidences:
            self._evidences[several] = MarginalLikelihood.of(
                self.curvature, self._likelihood, prior
            )
        return self._evidences[several]

    def _checked_prior(self, prior: Any) -> Prior:
        names = tuple(self.curvature.vector.shapes)
        for value in prior.values() if isinstance(prior, Mapping) else (prior,):
            check_positive("prior_precision", value)
        checked_damping(prior, names)
        for block in self.curvature.blocks:
            block.levels(prior)
        return dict(prior) if isinstance(prior, Mapping) else float(prior)

    def _checked_noise(self, noise: float) -> float:
        check_positive("noise", noise)
        return self._likelihood.checked_noise(noise)

    def _validated(self, inputs: Mapping[str, Array], targets: Targets) -> float:
        """Return the precision with the largest log-likelihood of targets, in two rounds."""
        outputs, linear = Outputs.of(self.curvature), Linearization(self.curvature)
        observed = outputs.observed(inputs, targets)
        candidates, best = _PRECISIONS, 0
        for _ in range(2):
            with single_threaded_blas(), ignore_overflow():
                powers = [self._powers(float(precision)) for precision in candidates]
                mean, variances = linear.variances(inputs, powers)
                scores = [
                    outputs.log_likelihood(mean, variance, observed, self.noise)
                    for variance in variances
                ]
            best = int(np.argmax(scores))
            low, high = candidates[max(best - 1, 0)], candidates[min(best + 1, len(scores) - 1)]
            precision = float(candidates[best])
            candidates = np.geomspace(low, high, _REFINED)
        return precision
