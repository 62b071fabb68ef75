"""Defines the causal language-model loss: each position predicts the next token."""

from typing import Any, ClassVar

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import ShapeError
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.losses.checks import Named, require_shape
from kfac_engine.losses.observed import Observed, times


class CausalNegativeLogProbLoss(CategoricalLogitsNegativeLogProbLoss):
    """Softmax cross-entropy of the logits of each position and the token after it.

    Targets and their weights have the positions of the tokens: logits of position t belong to the
    target and to the weight of position t + 1. The first target is not predicted, and the last
    logits do not count. Samples have the positions of the logits.

    Args:
        logits: Name of the logits, ``(n, positions, tokens)`` for the default axes.
        targets: Name of the token ids, ``(n, positions)``.
        seed: Seed of ``evaluate_on_sample``; None counts as 0.
        class_axis: Axis of the classes.
        batch_axis: Axis of the examples.
        ignore_index: Token id that does not count; None for none.
        label_smoothing: Part of each target, in [0, 1), that is divided among all tokens.

    Raises:
        InputError: An option has a wrong value.
    """

    min_rank: ClassVar[int] = 3
    ordered: ClassVar[bool] = True
    predicts_inputs: ClassVar[bool] = True

    def __init__(
        self,
        logits: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
        batch_axis: int = 0,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
    ) -> None:
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(logits, targets, seed, class_axis=class_axis, **options)
        self.batch_axis = batch_axis

    def placed(self, axis: int) -> "CausalNegativeLogProbLoss":
        options: dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
        }
        place: dict[str, Any] = {"class_axis": self.class_axis, "batch_axis": axis}
        return CausalNegativeLogProbLoss(self.logits, self.targets, self.seed, **place, **options)

    def check_inputs(self, values: Values) -> None:
        super().check_inputs(values)
        shape = values[self.logits].shape
        if len(shape) != 3 or shape[self.time_axis] < 2:
            raise ShapeError(
                f"'{self.logits}' has shape {shape}, but the loss 'causal_lm' needs three axes: "
                f"examples, at least two positions, and tokens; choose another output of the model."
            )

    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        if labels is None:
            counts = self._later_counts(values, counts)
        return super().weigh(values, labels, counts)

    def row_weights(self, values: Named) -> Array | None:
        weights = super().row_weights(values)
        return self._later_counts(values, None) if weights is None else weights

    def masked(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the targets of the logits: those of the next position, and their weights."""
        labels, counts = super().masked(values, targets, counts)
        # The targets lack the axis of the classes.
        time = self.time_axis - (self._axis(values) < self.time_axis)
        return _later(labels, time), self._later_counts(values, counts)

    def _that_count(
        self, values: Values, targets: Array, counts: Array | None
    ) -> tuple[Array, Array | None]:
        shape, axis = values[self.logits].shape, self._axis(values)
        expected = shape[:axis] + shape[axis + 1 :]
        meaning = f"the token at each position of '{self.logits}'; the loss itself shifts them"
        require_shape("targets", targets.shape, expected, meaning)
        targets = self._moved(values, targets)
        if targets.dtype.kind in "iu":
            self.check_target_array(values, super().masked(values, targets, counts)[0])
        else:
            self.check_target_array(values, targets)
        return self.masked(values, targets, counts)

    @property
    def time_axis(self) -> int:
        """Axis of the positions in the logits."""
        return 3 - self.class_axis % 3 - self.batch_axis

    def _later_counts(self, values: Named, counts: Array | None) -> Array:
        """Return weights of tokens at the positions that predict them, in the logits' rank."""
        z, time = values[self.logits], self.time_axis
        if counts is not None and counts.shape[time] != 1:
            return _later(counts, time)
        xp, first = array_module(z), z[(*(slice(None),) * (self.class_axis % 3), slice(0, 1))]
        predicted: Array = _later(~xp.zeros_like(first, dtype=np.bool_), time)
        if counts is None:
            return predicted
        result: Array = xp.where(predicted, counts, xp.zeros_like(counts))
        return result


def _later(array: Array, axis: int) -> Array:
    """Shift the entries by one towards the start of an axis, and put zeros at its end."""
    xp = array_module(array)
    sizes = [-1 if k == axis else 1 for k in range(array.ndim)]
    behind = xp.arange(array.shape[axis]).reshape(sizes) > 0
    later: Array = xp.roll(times(array, behind), -1, axis)
    return later
