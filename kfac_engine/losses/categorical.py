"""Softmax cross-entropy, with class ids or one-hot rows as targets.

Let p be the softmax of the logits z along the class axis. The Fisher matrix is
``F = diag(p) − p pᵀ``, with the factor ``B = diag(√p) − p √pᵀ`` (Martens & Grosse 2015,
arXiv:1503.05671, section 2).
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.backend.select import owner
from kfac_engine.errors import InputError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.checks import check_matching_targets, first_index, require_shape

# Largest accepted distance of a sum of probabilities from one: the rounding of half precision.
_ROW_SUM_TOLERANCE = 1e-3


class CategoricalLogitsNegativeLogProbLoss(LossFunction):
    """Softmax cross-entropy with integer class ids as targets.

    Args:
        logits: Name of the logits, of shape ``(n, …positions, classes)`` for the default
            ``class_axis``.
        targets: Name of the class ids, which have the shape of the logits without the class axis.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the classes.
    """

    min_rank: ClassVar[int] = 2
    discrete: ClassVar[bool] = True
    links: ClassVar[frozenset[str]] = frozenset({"Softmax", "LogSoftmax"})

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
        axis, log_p = self._axis(values), self._log_probs(values)
        xp = array_module(log_p)
        log_likelihood: Array = xp.take_along_axis(log_p, xp.expand_dims(targets, axis), axis=axis)
        return -log_likelihood

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        log_p = self._log_probs(values)
        rows = self._one_hot_rows(values, targets)
        return {self.logits: array_module(log_p).exp(log_p) - rows.astype(log_p.dtype)}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        axis, z = self._axis(values), values[self.logits]
        # The host draws the random numbers, so that a seed gives the same targets with every
        # library.
        uniforms = rng.random((*z.shape[:axis], *z.shape[axis + 1 :]))
        return owner(z).draw_classes(z, uniforms, axis)

    def fisher(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        p = self._probs(values)
        weighted = p * v[self.logits]
        return {self.logits: weighted - p * self._total(values, weighted)}

    def fisher_factor(self, values: Values, u: Array) -> dict[str, Array]:
        root = self._probs(values, power=0.5)
        weighted = root * u
        return {self.logits: weighted - root * root * self._total(values, weighted)}

    def fisher_factor_transpose(self, values: Values, v: Mapping[str, Array]) -> Array:
        root, x = self._probs(values, power=0.5), v[self.logits]
        result: Array = root * (x - self._total(values, root * root * x))
        return result

    def one_hot(self, values: Values, index: tuple[int, ...]) -> dict[str, Array]:
        z = values[self.logits]
        class_index = index[self._axis(values) - 1]
        position = list[int | slice]((slice(None), *index))
        position[self._axis(values)] = slice(None)
        # Positions are independent, so the result depends on the logits (n, classes) of one
        # position.
        root = array_module(z).exp(0.5 * _log_softmax(z[tuple(position)], axis=1))
        column = -root[:, class_index, None] * root * root
        column[:, class_index] += root[:, class_index]
        result = array_module(z).zeros_like(z)
        result[tuple(position)] = column
        return {self.logits: result}

    def hits(self, values: Values, targets: Array) -> Array:
        z = values[self.logits]
        equal: Array = array_module(z).argmax(z, axis=self._axis(values)) == targets
        return equal

    def ranks(self, values: Values, targets: Array) -> Array:
        z, axis = values[self.logits], self._axis(values)
        xp = array_module(z)
        ids = xp.expand_dims(targets, axis)
        of_target = xp.take_along_axis(z, ids, axis)
        classes = xp.arange(z.shape[axis]).reshape([-1, *[1] * (z.ndim - 1 - axis)])
        ahead: Array = ((z > of_target) | ((z == of_target) & (classes < ids))).sum(axis=axis)
        return ahead

    def check_target_array(self, values: Values, targets: Array) -> None:
        axis, shape = self._axis(values), values[self.logits].shape
        expected = shape[:axis] + shape[axis + 1 :]
        require_shape(
            "targets", targets.shape, expected, f"one class id per row of '{self.logits}'"
        )
        if targets.dtype.kind not in "iu":
            raise InputError(
                f"targets of '{self.logits}' must be integer class ids, got {targets.dtype}; "
                f"convert them with targets.astype('int64')."
            )
        outside = (targets < 0) | (targets >= shape[axis])
        if outside.any():
            where = first_index(outside)
            at = f", position {where[1:]}" if where[1:] else ""
            raise InputError(
                f"target {targets[where]} of example {where[0]}{at} is not a class: "
                f"'{self.logits}' has {shape[axis]} classes, 0 to {shape[axis] - 1}."
            )

    def _one_hot_rows(self, values: Values, targets: Array) -> Array:
        """Return the targets as one-hot rows, booleans in the shape of the logits."""
        z, axis = values[self.logits], self._axis(values)
        xp = array_module(z)
        ids = xp.arange(z.shape[axis]).reshape([-1 if i == axis else 1 for i in range(z.ndim)])
        rows: Array = ids == xp.expand_dims(targets, axis)
        return rows

    def _log_probs(self, values: Values) -> Array:
        return _log_softmax(values[self.logits], self._axis(values))

    def _probs(self, values: Values, power: float = 1.0) -> Array:
        log_p = self._log_probs(values)
        p: Array = array_module(log_p).exp(power * log_p)
        return p

    def _total(self, values: Values, x: Array) -> Array:
        """Return the sum over the classes, with a class axis of size 1."""
        total: Array = x.sum(axis=self._axis(values), keepdims=True)
        return total


class OnehotCategoricalLogitsNegativeLogProbLoss(CategoricalLogitsNegativeLogProbLoss):
    """Softmax cross-entropy with one-hot rows in the shape of the logits as targets.

    Rows of probabilities, such as smoothed labels, are valid targets too. The loss is then the
    cross-entropy relative to these probabilities.
    """

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        log_p = self._log_probs(values)
        # Finite logits have finite log-probabilities, so the product never is 0·∞.
        result: Array = -(targets.astype(log_p.dtype, copy=False) * log_p)
        return result

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        ids = super().sample(values, rng)
        return super()._one_hot_rows(values, ids).astype(values[self.logits].dtype)

    def hits(self, values: Values, targets: Array) -> Array:
        return super().hits(values, targets.argmax(axis=self._axis(values)))

    def ranks(self, values: Values, targets: Array) -> Array:
        return super().ranks(values, targets.argmax(axis=self._axis(values)))

    def check_target_array(self, values: Values, targets: Array) -> None:
        check_matching_targets(self.logits, values[self.logits], targets)
        off = abs(self._total(values, targets.astype(np.float64)) - 1) > _ROW_SUM_TOLERANCE
        if (targets < 0).any() or off.any():
            raise InputError(
                f"targets of '{self.logits}' must be one-hot rows or probabilities: non-negative, "
                f"with sum 1 along the class axis."
            )

    def _one_hot_rows(self, values: Values, targets: Array) -> Array:
        return targets


def _log_softmax(z: Array, axis: int) -> Array:
    """Return ``log softmax(z)``, which is finite for every finite z."""
    xp = array_module(z)
    shifted = z - z.max(axis=axis, keepdims=True)
    result: Array = shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))
    return result
