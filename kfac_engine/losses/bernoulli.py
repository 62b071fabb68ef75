"""Sigmoid cross-entropy of independent binary targets.

Let z be a logit, ``p = σ(z)`` its probability and t the target. The negative log-probability is
``softplus(z) − t z``. The Fisher information is ``p (1 − p)``. All formulas are evaluated with
``e = exp(−|z|)``, which never overflows and stays accurate for large ``|z|``.
"""

from typing import ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError
from kfac_engine.losses.checks import check_matching_targets, first_index
from kfac_engine.losses.elementwise import ElementwiseLoss


class MultiBernoulliNegativeLogProbLoss(ElementwiseLoss):
    """Sigmoid cross-entropy; each logit predicts one binary target.

    Args:
        logits: Name of the logits, of any shape with the batch on the first axis.
        targets: Name of the targets, in the shape of the logits. A target is 0, 1 or a
            probability between them. For probabilities, the loss is the cross-entropy.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the features.
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
    ) -> None:
        super().__init__((logits,), targets, seed, class_axis)
        self.logits = logits

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

    def hits(self, values: Values, targets: Array) -> Array:
        equal: Array = (values[self.logits] > 0) == (targets > 0.5)
        return equal

    def check_target_array(self, values: Values, targets: Array) -> None:
        check_matching_targets(self.logits, values[self.logits], targets)
        outside = (targets < 0) | (targets > 1)
        if outside.any():
            where = first_index(outside)
            raise InputError(
                f"target {targets[where]} at {where} of '{self.logits}' is not in 0 to 1; "
                f"a binary target is 0 or 1."
            ).at("targets", where)

    def _probs(self, values: Values) -> tuple[Array, Array]:
        """Return p and q = 1 − p, both to full relative precision."""
        z = values[self.logits]
        return _probabilities(z, array_module(z).exp(-abs(z)))


def _probabilities(z: Array, e: Array) -> tuple[Array, Array]:
    """Return ``p`` and ``1 − p`` of logits z, for ``e = exp(−|z|)``."""
    xp, positive, total = array_module(z), z >= 0, 1 + e
    large, small = 1 / total, e / total
    return xp.where(positive, large, small), xp.where(positive, small, large)
