"""Independent yes/no answers: sigmoid cross-entropy on logits.

Formulas with z a logit and p = σ(z): −log p(t) = softplus(z) − t z, Fisher information p (1 − p).
All of them go through ``e = exp(−|z|)``, which never overflows and keeps the tails' digits.
"""

from typing import ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError
from kfac_engine.losses.checks import check_matching_targets, first_index
from kfac_engine.losses.elementwise import ElementwiseLoss


class MultiBernoulliNegativeLogProbLoss(ElementwiseLoss):
    """Sigmoid cross-entropy; every logit is an answer of its own.

    Args:
        logits: Name of the logits, any shape with the batch first.
        targets: Name of the answers in the shape of the logits, 0 or 1; probabilities in between
            are taken as well: the loss is then the cross-entropy.
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
        z = values[self.logits]
        xp = array_module(z)
        # The linear part alone is exactly 0 for a large logit with the right answer.
        linear = xp.maximum(z, 0) - targets.astype(z.dtype) * z
        result: Array = linear + xp.log1p(xp.exp(-abs(z)))
        return result

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        yes, no = self._probs(values)
        t = targets.astype(yes.dtype)
        # p − t, without cancellation where p is close to t = 1.
        return {self.logits: (1 - t) * yes - t * no}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        yes, _ = self._probs(values)
        below: Array = array_module(yes).asarray(rng.random(yes.shape)) < yes
        return below.astype(yes.dtype)

    def information(self, values: Values) -> dict[str, Array]:
        yes, no = self._probs(values)
        return {self.logits: yes * no}

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
                f"a yes/no answer is 0 or 1."
            )

    def _probs(self, values: Values) -> tuple[Array, Array]:
        """The pair p, 1 − p, each to full relative precision."""
        z = values[self.logits]
        xp = array_module(z)
        e = xp.exp(-abs(z))
        large, small = 1 / (1 + e), e / (1 + e)
        return xp.where(z >= 0, large, small), xp.where(z >= 0, small, large)
