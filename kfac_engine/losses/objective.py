"""The objective: a sum of losses under a reduction, with its gradient and Fisher matrix.

A loss object sums over the batch and its positions. A reduction scales this sum and its Fisher
matrix. For n examples with t positions each:

=============  ==================  ======================
reduction      gradient            Fisher matrix
=============  ==================  ======================
mean           sum / (n·t)         mean over n, ÷ t
batch_mean     sum / n             mean over n
sum            sum                 mean over n, × n
=============  ==================  ======================

For a shard of a larger batch, n is the number of examples of the larger batch. The caller passes it
as ``examples``. The loss of the larger batch is then the sum of the losses of its shards, and its
gradient is the sum of their gradients. All shards must have the same number of positions t.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.losses.base import LossFunction, RegisteredLoss
from kfac_engine.suggestions import suggestion

Reduction: TypeAlias = Literal["mean", "batch_mean", "sum"]
Targets: TypeAlias = Array | Mapping[str, Array] | None
REDUCTIONS: tuple[Reduction, ...] = ("mean", "batch_mean", "sum")


@dataclass(frozen=True, slots=True)
class Objective:
    """The function that training minimises: a sum of losses under one reduction.

    Attributes:
        losses: Losses to add, at least one.
        reduction: A row of the table of this module.
        batch: Name of a value whose first axis has an entry for each example. If it is empty, the
            first axis of the loss inputs must be such an axis.
        outputs: Map from a loss input to the model output on which the user put the loss, if the
            two differ.
    """

    losses: tuple[RegisteredLoss, ...]
    reduction: Reduction
    batch: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the losses read, each once."""
        towers = (tower for loss in self.losses for tower in loss.towers)
        return tuple(dict.fromkeys(name for tower in towers for name in tower.inputs))

    def named_targets(self, targets: Targets) -> dict[str, Array]:
        """Return the targets under the names that the losses read.

        Args:
            targets: One array for a single loss, or a mapping to arrays. A key of the mapping is
                the name of the output of a loss, or the name of the targets in a loss object.

        Returns:
            Map from names of targets to arrays.

        Raises:
            InputError: ``targets`` is one array, but there are several losses.
            UnknownNameError: A key belongs to no loss.
        """
        towers = [tower for loss in self.losses for tower in loss.towers]
        targeted = {tower.inputs[0]: tower.targets for tower in towers if tower.targets}
        by_output = {self.outputs.get(value, value): name for value, name in targeted.items()}
        if targets is None:
            return {}
        if not isinstance(targets, Mapping):
            if len(towers) > 1:
                raise InputError(
                    f"one array cannot be the targets of several losses; pass a mapping with the "
                    f"keys {', '.join(by_output)}."
                )
            return {name: as_array(targets) for name in by_output.values()}
        names = {name: name for name in targeted.values()} | targeted | by_output
        for name in targets:
            if name not in names:
                raise UnknownNameError(
                    f"targets are given for '{name}'{suggestion(name, by_output)}, but no loss is "
                    f"on an output of that name; the losses are on: {', '.join(by_output)}."
                )
        return {names[name]: as_array(array) for name, array in targets.items()}

    def value(self, values: Values, *, examples: int | None = None) -> float:
        """Return the reduced loss on the targets of a batch.

        Args:
            values: Loss inputs and targets by name.
            examples: Number n of examples; None for the number of examples in the batch.

        Returns:
            The sum over the losses, each times its coefficient, in nats.
        """
        parts = [
            loss.coefficient * self._gradient_weight(tower, values, examples) * tower.value(values)
            for loss in self.losses
            for tower in loss.towers
        ]
        total: float = sum(parts)
        return total

    def cotangents(
        self, values: Values, times: float = 1.0, *, examples: int | None = None
    ) -> dict[str, Array]:
        """Return ``times`` times the gradient of ``value``; see ``value_and_cotangents``."""
        return self.value_and_cotangents(values, times, examples=examples)[1]

    def value_and_cotangents(
        self, values: Values, times: float = 1.0, *, examples: int | None = None
    ) -> tuple[float, dict[str, Array]]:
        """Return ``value``, and ``times`` times its gradient with respect to each loss input.

        Args:
            values: Loss inputs and targets by name.
            times: Factor of the gradient.
            examples: As for ``value``.

        Returns:
            The value in nats, and a map from a loss input to a gradient of its shape.
        """
        total, cotangents = 0.0, dict[str, Array]()
        for loss in self.losses:
            for tower in loss.towers:
                reduction_weight = self._gradient_weight(tower, values, examples)
                value, gradients = tower.value_and_gradient(values)
                total += loss.coefficient * reduction_weight * value
                weight = times * loss.coefficient * reduction_weight
                for name, gradient in gradients.items():
                    part = weight * gradient
                    cotangents[name] = cotangents[name] + part if name in cotangents else part
        return total, cotangents

    def weights(self, values: Values, *, examples: int | None = None) -> tuple[float, ...]:
        """Return the weight of each tower of each loss in ``value`` and in its Fisher matrix.

        Args:
            values: Loss inputs by name.
            examples: As for ``value``.

        Returns:
            For each tower, the coefficient of its loss times the weight of the reduction.
        """
        return tuple(
            loss.coefficient * self._gradient_weight(tower, values, examples)
            for loss in self.losses
            for tower in loss.towers
        )

    def fisher_scales(self, values: Values, *, examples: int | None = None) -> dict[str, float]:
        """Return the scale of the cotangents of each loss input for the Fisher matrix.

        The scale is the square root of the weight of the reduction in the Fisher matrix.

        Args:
            values: Loss inputs by name.
            examples: As for ``value``.

        Returns:
            Map from a loss input to its scale.
        """
        return {
            name: sqrt(self._fisher_weight(tower, values, examples))
            for loss in self.losses
            for tower in loss.towers
            for name in tower.inputs
        }

    def fisher_ratio(self, values: Values, *, examples: int | None = None) -> float | None:
        """Return the ratio of the source of mode ``empirical`` to the gradient of ``value``.

        Args:
            values: Loss inputs by name.
            examples: As for ``value``.

        Returns:
            The ratio; None if it differs between losses.
        """
        ratios = {
            sqrt(self._fisher_weight(tower, values, examples))
            / self._gradient_weight(tower, values, examples)
            for loss in self.losses
            for tower in loss.towers
        }
        return ratios.pop() if len(ratios) == 1 else None

    def examples(self, values: Values) -> int:
        """Return the number of examples in a batch."""
        return len(values[self.batch or self.inputs[0]])

    def positions(self, values: Values) -> int:
        """Return the number of predictions of all losses for each example of a batch."""
        towers = (tower for loss in self.losses for tower in loss.towers)
        return sum(_predictions(tower, values) for tower in towers) // self.examples(values)

    def _gradient_weight(
        self, loss: LossFunction, values: Values, examples: int | None = None
    ) -> float:
        """Return the weight of the reduction in the gradient of one loss."""
        batch, predictions = self.examples(values), _predictions(loss, values)
        n = batch if examples is None else examples
        # predictions = batch · t. A single division of integers gives exactly 1 / (n·t) for
        # n = batch.
        weights = {"mean": batch / (predictions * n), "batch_mean": 1 / n, "sum": 1.0}
        return weights[self.reduction]

    def _fisher_weight(
        self, loss: LossFunction, values: Values, examples: int | None = None
    ) -> float:
        """Return the weight of the reduction in the Fisher matrix of one loss."""
        batch, predictions = self.examples(values), _predictions(loss, values)
        n = batch if examples is None else examples
        weights = {"mean": batch / predictions, "batch_mean": 1.0, "sum": float(n)}
        return weights[self.reduction]


def check_reduction(reduction: str) -> None:
    """Check that a reduction is known.

    Args:
        reduction: A name from the user.

    Raises:
        InputError: The reduction is not in ``REDUCTIONS``.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise InputError(
            f"unknown reduction '{reduction}'{suggestion(reduction, REDUCTIONS)}; choose one of: "
            f"{', '.join(REDUCTIONS)}."
        )


def _predictions(loss: LossFunction, values: Values) -> int:
    """Return the number of predictions in a batch: examples times positions."""
    return len(values[loss.inputs[0]]) * loss.positions(values)
