"""Defines sigmoid cross-entropy for independent binary targets.

Let z be a logit, ``p = σ(z)`` its probability and t the target. The negative log-probability is
``softplus(z) − t z``. The Fisher information is ``p (1 − p)``. All formulas are evaluated with
``e = exp(−|z|)``, which never overflows and stays accurate for large ``|z|``.
"""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, recordable
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.losses.base import ElementwiseLoss
from kfac_engine.losses.checks import class_numbers, first_index, smoothing
from kfac_engine.losses.observed import Observed, times, total_weight


class MultiBernoulliNegativeLogProbLoss(ElementwiseLoss):
    """Sigmoid cross-entropy; each logit predicts one binary target.

    Args:
        logits: Name of the logits, of any shape with the batch on the first axis.
        targets: Name of the targets, in the shape of the logits. A target is 0, 1 or a
            probability between them. For probabilities, the loss is the cross-entropy.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
        ignore_index: Target that does not count; None for none.
        positive_weights: A number ≥ 0, or one for each feature: the weight of targets of 1; None
            for 1. It is not part of the divisor of a mean.
        label_smoothing: Part of each target, in [0, 1), that is divided among 0 and 1.

    Raises:
        InputError: An option has a wrong value.
    """

    discrete: ClassVar[bool] = True
    links: ClassVar[frozenset[str]] = frozenset({"Sigmoid"})

    def __init__(
        self,
        logits: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        ignore_index: int | None = -100,
        positive_weights: float | Sequence[float] | Array | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__((logits,), targets, seed, class_axis, ignore_index)
        self.logits = logits
        if isinstance(positive_weights, Real):
            positive_weights = [positive_weights]
        self.positive_weights = class_numbers("positive_weights", positive_weights)
        self.label_smoothing = smoothing(label_smoothing)

    @recordable
    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        observed, positive = super().weigh(values, labels, counts), self.positive_weights
        if positive is None and (labels is None or not self.label_smoothing):
            return observed
        z = values[self.logits]
        if labels is None:
            raise InputError(
                f"the loss on '{self.logits}' has positive_weights, so its Fisher matrix depends "
                f"on the targets; pass targets with the batch."
            )
        xp, t = array_module(z), labels.astype(z.dtype, copy=False)
        t = t * (1 - self.label_smoothing) + self.label_smoothing / 2
        if positive is None:
            return replace(observed, targets=t)
        axis = self._axis(values) if z.ndim > 1 else 0
        if len(positive) not in (1, z.shape[axis] if z.ndim > 1 else 1):
            raise ShapeError(
                f"positive_weights has {len(positive)} numbers, but '{self.logits}' has "
                f"{z.shape[axis]} features."
            )
        of_ones = xp.asarray(positive, z.dtype).reshape([-1, *[1] * (z.ndim - 1 - axis)])
        # The loss −w t log p − (1 − t) log q equals W times the loss of the target w t / W.
        weights = of_ones * t + (1 - t)
        targets = xp.where(weights > 0, of_ones * t / xp.where(weights > 0, weights, 1), t)
        return replace(observed, targets=targets, weights=times(weights, counts))

    @property
    def weighs_classes(self) -> bool:
        return self.positive_weights is not None

    def may_observe(self, values: Values, target: int) -> bool:
        return 0 <= target <= 1

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return self.terms_and_gradient(values, targets)[0]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        return self.terms_and_gradient(values, targets)[1]

    def terms_and_gradient(self, values: Values, targets: Array) -> tuple[Array, dict[str, Array]]:
        z = values[self.logits]
        xp, t = array_module(z), targets.astype(z.dtype, copy=False)
        e = xp.exp(-abs(z))
        # The linear part is exactly 0 for a large logit of the same sign as its target.
        terms = xp.maximum(z, 0) - t * z + xp.log1p(e)
        p, q = _probabilities(z, e)
        # This is p − t, without cancellation for p close to t = 1.
        return terms, {self.logits: (1 - t) * p - t * q}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        p, _ = self._probs(values)
        targets: Array = array_module(p).asarray(rng.random(p.shape)) < p
        return targets.astype(p.dtype)

    def information(self, values: Values) -> dict[str, Array]:
        p, q = self._probs(values)
        return {self.logits: p * q}

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        z = values[self.logits]
        features = z.shape[self._axis(values)] if z.ndim > 1 else 1
        return total_weight(weights, z.shape, self._axis(values)) * features / 4

    @recordable
    def hits(self, values: Values, targets: Array) -> Array:
        equal: Array = (values[self.logits] > 0) == (targets > 0.5)
        return equal

    def rate_sums(self, values: Values, observed: Observed, gradients: Values) -> tuple[Any, ...]:
        del values
        return self.sums_of_rates(observed, gradients[self.logits])

    def check_target_array(self, values: Values, targets: Array) -> None:
        super().check_target_array(values, targets)
        outside = (targets < 0) | (targets > 1)
        if outside.any():
            where = first_index(outside)
            raise InputError(
                f"target {targets[where]} at {where} of '{self.logits}' is not in 0 to 1; "
                f"a binary target is 0 or 1."
            ).at("targets", where)

    def _probs(self, values: Values) -> tuple[Array, Array]:
        """Return p and q = 1 − p, each to full relative precision."""
        z = values[self.logits]
        return _probabilities(z, array_module(z).exp(-abs(z)))


def _probabilities(z: Array, e: Array) -> tuple[Array, Array]:
    """Return ``p`` and ``1 − p`` of logits z, for ``e = exp(−|z|)``."""
    xp, positive, total = array_module(z), z >= 0, 1 + e
    large, small = 1 / total, e / total
    return xp.where(positive, large, small), xp.where(positive, small, large)
