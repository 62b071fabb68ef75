"""Defines losses for outliers and counts: Laplace, Huber and Poisson distributions.

The negative logarithms of the Laplace and Huber densities are the absolute and the Huber error, up
to a factor and a constant. The Fisher information with respect to the mean is a constant, while the
second derivative of the loss is zero for large errors: curvature matrices are Fisher matrices.
"""

from collections.abc import Mapping
from math import erf, exp, log, pi, sqrt
from typing import Any, ClassVar

import numpy as np
from scipy import special

from kfac_engine._types import Array, Values
from kfac_engine.arguments import check_positive
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError
from kfac_engine.losses.base import ElementwiseLoss
from kfac_engine.losses.checks import first_index
from kfac_engine.losses.normal import LocationLoss
from kfac_engine.losses.observed import Observed, times

# Least probability that is drawn; it is a number of single precision, for files.
_TINY = 1e-30

# Stirling's series of log Γ(y), times y, in powers of 1/y², the highest first.
STIRLING = (1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)


class OutlierLoss(LocationLoss):
    """A distribution of errors, of which the gradients of far errors say the sign only."""

    def target_sums(
        self, values: Values, observed: Observed, gradients: Values, centre: Any = 0.0
    ) -> tuple[Any, ...]:
        targets = observed.targets
        assert targets is not None, "observe has read the targets"
        errors, g = self.errors(values, targets), self.gradient_of(values, targets)[self.mean]
        sums = self.sums_of_errors(observed, times(errors, observed.weights), centre)
        products = (times(x, observed.weights) for x in (errors * errors, abs(errors), errors * g))
        return (*sums, *(product.sum(dtype=np.float64) for product in products))


class LaplaceNegativeLogProbLoss(OutlierLoss):
    """Laplace distribution with mean m and scale b: ``|t − m|/b + log 2b`` for a target t.

    For b = 1, the loss is the absolute error plus a constant. The Fisher information is ``1/b²``.

    Args:
        mean: Name of the predicted means, of any shape with the batch on the first axis.
        scale: The scale b > 0.
        targets: Name of the targets, in the shape of the means.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.

    Raises:
        InputError: The scale is not a positive number.
    """

    ggn_equals_fisher: ClassVar[bool] = False

    def __init__(
        self,
        mean: str,
        scale: float = 1.0,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__((mean,), targets, seed, class_axis, ignore_index)
        check_positive(f"the scale of the loss on '{mean}'", scale)
        self.scale = float(scale)

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        result: Array = abs(self.errors(values, targets)) / self.scale + log(2 * self.scale)
        return result

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        error = self.errors(values, targets)
        return {self.mean: array_module(error).sign(error) / self.scale}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        u = rng.random(values[self.mean].shape) - 0.5
        return self._drawn(values, -self.scale * np.sign(u) * np.log1p(-2 * np.abs(u)))

    def information(self, values: Values) -> dict[str, Array]:
        return self._constant(values, self.scale**-2)

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        return {self.mean: 0 * v[self.mean]}


class HuberNegativeLogProbLoss(OutlierLoss):
    """Huber distribution: ``e²/2`` for errors ``|e| ≤ δ``, ``δ(|e| − δ/2)`` for others, plus log Z.

    The Fisher information is the probability of an error within δ.

    Args:
        mean: Name of the predicted means, of any shape with the batch on the first axis.
        delta: The error δ > 0 from which the loss is linear.
        targets: Name of the targets, in the shape of the means.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.

    Raises:
        InputError: ``delta`` is not a positive number.

    Source: Huber 1964, Robust estimation of a location parameter, section 4.
    """

    ggn_equals_fisher: ClassVar[bool] = False

    def __init__(
        self,
        mean: str,
        delta: float = 1.0,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__((mean,), targets, seed, class_axis, ignore_index)
        check_positive(f"delta of the loss on '{mean}'", delta)
        self.delta = float(delta)
        centre = sqrt(2 * pi) * erf(self.delta / sqrt(2))  # ∫ exp(−e²/2) within δ
        tails = 2 / self.delta * exp(-(self.delta**2) / 2)
        self.log_normalizer, self._within = log(centre + tails), centre / (centre + tails)

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        error = abs(self.errors(values, targets))
        small = array_module(error).minimum(error, self.delta)
        result: Array = small * (error - small / 2) + self.log_normalizer
        return result

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        error = self.errors(values, targets)
        return {self.mean: error.clip(-self.delta, self.delta)}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        u = rng.random(values[self.mean].shape)
        # The distribution function has an inverse in each of its parts.
        tail = max((1 - self._within) / 2, _TINY)
        part = np.minimum(u, 1 - u)
        far = self.delta + np.log(tail / np.maximum(part, _TINY)) / self.delta
        low = special.ndtr(-self.delta)
        share = (u - tail).clip(0, self._within) / self._within
        middle = special.ndtri(low + share * (1 - 2 * low))
        return self._drawn(values, np.where(part < tail, np.sign(u - 0.5) * far, middle))

    def information(self, values: Values) -> dict[str, Array]:
        return self._constant(values, self._within)

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        error = self.errors(values, self._moved(values, values[self.require_target_name()]))
        return {self.mean: (abs(error) <= self.delta) * v[self.mean]}


class PoissonNegativeLogProbLoss(ElementwiseLoss):
    """Counts with the logarithm z of their rate: ``exp z − t z + log t!`` for a target t.

    Args:
        log_rate: Name of the logarithms of the rates, of any shape with the batch first.
        targets: Name of the counts, in the shape of the rates; any numbers ≥ 0.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.
    """

    def __init__(
        self,
        log_rate: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = -100,
    ) -> None:
        super().__init__((log_rate,), targets, seed, class_axis, ignore_index)
        self.log_rate = log_rate

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        z = values[self.log_rate]
        xp, t = array_module(z), targets.astype(z.dtype, copy=False)
        host = targets.get() if hasattr(targets, "get") else targets
        result: Array = xp.exp(z) - t * z + xp.asarray(special.gammaln(host + 1.0), z.dtype)
        return result

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        z = values[self.log_rate]
        return {self.log_rate: array_module(z).exp(z) - targets.astype(z.dtype, copy=False)}

    def rate_sums(self, values: Values, observed: Observed, gradients: Values) -> tuple[Any, ...]:
        del values
        assert observed.targets is not None, "observe has read the targets"
        g = gradients[self.log_rate]
        t = observed.targets.astype(g.dtype, copy=False)
        return self.sums_of_rates(observed, g, t * np.log(array_module(g).maximum(t, _TINY)))

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        z = values[self.log_rate]
        host = z.get() if hasattr(z, "get") else z
        rate, u = np.exp(host.astype(np.float64)), rng.random(z.shape)
        counts = np.ceil(special.pdtrik(u, rate)).clip(0)
        fewer = (counts - 1).clip(0)
        counts = np.where(special.pdtr(fewer, rate) >= u, fewer, counts)  # against rounding
        result: Array = array_module(z).asarray(counts, z.dtype)
        return result

    def information(self, values: Values) -> dict[str, Array]:
        z = values[self.log_rate]
        return {self.log_rate: array_module(z).exp(z)}

    def may_observe(self, values: Values, target: int) -> bool:
        return target >= 0

    def check_target_array(self, values: Values, targets: Array) -> None:
        super().check_target_array(values, targets)
        if (targets < 0).any():
            where = first_index(targets < 0)
            raise InputError(
                f"target {targets[where]} at {where} of '{self.log_rate}' is not a count: it is "
                f"negative."
            ).at("targets", where)

    def errors(self, values: Values, targets: Array) -> Array:
        z = values[self.log_rate]
        result: Array = array_module(z).exp(z) - targets.astype(z.dtype, copy=False)
        return result
