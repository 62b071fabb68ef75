"""Defines losses of Gaussian targets, with a fixed or a predicted variance."""

from collections.abc import Mapping
from math import log, pi
from typing import Any, ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.arguments import check_positive
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.losses.base import ElementwiseLoss
from kfac_engine.losses.checks import first_index
from kfac_engine.losses.observed import Observed, times

# Beyond all targets, and finite in float32.
_FAR = 1e30


class LocationLoss(ElementwiseLoss):
    """A distribution of the errors of a mean; the first input is the mean."""

    var: float = 1.0  # the variance that divides errors and targets in ``target_sums``

    def __init__(
        self,
        inputs: tuple[str, ...],
        targets: str | None,
        seed: int | None,
        class_axis: int,
        ignore_index: int | None,
    ) -> None:
        super().__init__(inputs, targets, seed, class_axis, ignore_index)
        self.mean = inputs[0]

    def errors(self, values: Values, targets: Array) -> Array:
        mean = values[self.mean]
        result: Array = mean - targets.astype(mean.dtype, copy=False)
        return result

    def sums_of_errors(self, observed: Observed, errors: Array, centre: Any) -> tuple[Any, ...]:
        """Return ``target_sums`` of squared errors; ``errors`` are divided by the variance."""
        g, over = self._by_feature(observed)
        g = g - centre
        powers = (times(x, observed.weights) for x in (array_module(g).ones_like(g), g, g * g))
        sums = [power.sum(axis=over).reshape(-1) for power in powers]
        of_errors = errors.sum(axis=over, dtype=np.float64).reshape(-1)
        of_feature = centre if isinstance(centre, float) else centre.reshape(-1)
        of_targets = sums[1] + sums[0] * of_feature
        return (sums[0].sum() / self.var**2, *sums, of_errors, of_targets)

    def target_centre(self, observed: Observed) -> Any:
        g, over = self._by_feature(observed)
        xp = array_module(g)
        weights = times(xp.ones_like(g), observed.weights)
        weight, total = (x.sum(axis=over, keepdims=True) for x in (weights, weights * g))
        low = xp.where(weights > 0, g, _FAR).min(axis=over, keepdims=True)
        high = xp.where(weights > 0, g, -_FAR).max(axis=over, keepdims=True)
        # Rounding may carry the mean of equal targets beyond them.
        mean = xp.maximum(xp.minimum(total / xp.where(weight > 0, weight, 1), high), low)
        return xp.where(weight > 0, mean, 0)

    def _by_feature(self, observed: Observed) -> tuple[Array, tuple[int, ...]]:
        """Return targets divided by the variance, and all their axes except the features' axis."""
        assert observed.targets is not None, "observe has read the targets"
        t = observed.targets.astype(np.float64)
        axis = self.class_axis % t.ndim if t.ndim > 1 else None
        return t / self.var, tuple(k for k in range(t.ndim) if k != axis)

    def _constant(self, values: Values, information: float) -> dict[str, Array]:
        mean = values[self.mean]
        return {self.mean: array_module(mean).full_like(mean, information)}

    def _drawn(self, values: Values, errors: Array) -> Array:
        """Return the means plus errors, in the element type of the means."""
        mean = values[self.mean]
        result: Array = (mean + array_module(mean).asarray(errors)).astype(mean.dtype)
        return result


class NormalMeanNegativeLogProbLoss(LocationLoss):
    """Gaussian with mean m and fixed variance v: ``½ log 2πv + (t − m)²/2v`` for a target t.

    For v = ½, the loss is the squared error plus a constant.

    Args:
        mean: Name of the predicted means, of any shape with the batch on the first axis.
        var: The variance v > 0.
        targets: Name of the targets, in the shape of the means.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.

    Raises:
        InputError: The variance is not a positive number.
    """

    def __init__(
        self,
        mean: str,
        var: float = 0.5,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__((mean,), targets, seed, class_axis, ignore_index)
        check_positive(f"the variance of the loss on '{mean}'", var)
        self.var = float(var)

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return self.terms_and_gradient(values, targets)[0]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        return {self.mean: self.errors(values, targets) / self.var}

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        error = self.errors(values, targets)
        terms = error * error / (2 * self.var) + 0.5 * log(2 * pi * self.var)
        return terms, {self.mean: error / self.var}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        return self._drawn(values, self.var**0.5 * rng.standard_normal(values[self.mean].shape))

    def information(self, values: Values) -> dict[str, Array]:
        return self._constant(values, 1 / self.var)

    def target_sums(
        self, values: Values, observed: Observed, gradients: Values, centre: Any = 0.0
    ) -> tuple[Any, ...]:
        return self.sums_of_errors(observed, gradients[self.mean], centre)


class NormalMeanVarianceNegativeLogProbLoss(LocationLoss):
    """Gaussian with predicted mean m and variance s: ``½ log 2πs + (t − m)²/2s`` for a target t.

    A vector of the input space has an array for the means and an array for the variances. A vector
    of the inner space is their concatenation along the class axis. The inputs are not natural
    parameters, so the generalised Gauss–Newton matrix is not defined.

    Args:
        mean: Name of the predicted means, of shape ``(n, …, features)``.
        variance: Name of the predicted variances, all positive, in the shape of the means.
        targets: Name of the targets, in the shape of the means.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.

    Raises:
        RegistrationError: ``mean`` and ``variance`` are the same name.
    """

    min_rank: ClassVar[int] = 2
    ggn_equals_fisher: ClassVar[bool] = False

    def __init__(
        self,
        mean: str,
        variance: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__((mean, variance), targets, seed, class_axis, ignore_index)
        if mean == variance:
            raise RegistrationError(f"'{mean}' cannot be both mean and variance of a loss.")
        self.variance = variance

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return self.terms_and_gradient(values, targets)[0]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        return self.terms_and_gradient(values, targets)[1]

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        error, s = self.errors(values, targets), values[self.variance]
        terms = 0.5 * (error * error / s + array_module(s).log(2 * pi * s))
        scaled = error / s
        return terms, {self.mean: scaled, self.variance: 0.5 * (1 / s - scaled * scaled)}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        s = values[self.variance]
        xp = array_module(s)
        return self._drawn(values, xp.sqrt(s) * xp.asarray(rng.standard_normal(s.shape)))

    def information(self, values: Values) -> dict[str, Array]:
        s = values[self.variance]
        return {self.mean: 1 / s, self.variance: 0.5 / (s * s)}

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        error = self.errors(values, self._moved(values, values[self.require_target_name()]))
        s = values[self.variance]
        mean, variance = v[self.mean], v[self.variance]
        mixed = error / (s * s)
        second = (error * error / s - 0.5) / (s * s)
        return {
            self.mean: mean / s - mixed * variance,
            self.variance: second * variance - mixed * mean,
        }

    def check_inputs(self, values: Values) -> None:
        """Check that the inputs are finite arrays of one shape and that all variances are positive.

        Args:
            values: The values of a batch.

        Raises:
            KfacError: As in ``LossFunction.check_inputs``.
            InputError: A variance is zero or negative.
        """
        super().check_inputs(values)
        s = values[self.variance]
        if (s <= 0).any():
            where = first_index(s <= 0)
            raise InputError(
                f"'{self.variance}' is a variance but contains {s[where]} at {where}; end the "
                f"model in an operator with positive results, such as Softplus or Exp."
            )
