"""What is minimised: losses under a reduction, and the Fisher matrix that goes with them.

A loss object sums over the batch and its positions. The reduction says what the user's loss is, and
gradient and Fisher matrix follow the same choice (n examples, t positions each):

=============  ==================  ======================
reduction      gradient            Fisher matrix
=============  ==================  ======================
mean           sum / (n·t)         mean over n, ÷ t
batch_mean     sum / n             mean over n
sum            sum                 mean over n, × n
=============  ==================  ======================

Where a batch is one shard of a larger batch, n is the number of examples of the larger batch, which
the caller passes as ``examples``. The sum of the losses of all shards, and of their gradients, is
then that of the larger batch. Shards must have the same number of positions t.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.losses.base import LossFunction, RegisteredLoss

Reduction: TypeAlias = Literal["mean", "batch_mean", "sum"]
Targets: TypeAlias = Array | Mapping[str, Array] | None
REDUCTIONS: tuple[Reduction, ...] = ("mean", "batch_mean", "sum")


@dataclass(frozen=True, slots=True)
class Objective:
    """Losses with their reduction.

    Attributes:
        losses: One or more; their values are added.
        reduction: A row of the table above.
        batch: Name of a value with the examples, and nothing else, on its first axis; without one
            the loss inputs are taken for such.
        outputs: Loss input to the model output that the user put the loss on, where it is another.
    """

    losses: tuple[RegisteredLoss, ...]
    reduction: Reduction
    batch: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values the losses read."""
        towers = (tower for loss in self.losses for tower in loss.towers)
        return tuple(dict.fromkeys(name for tower in towers for name in tower.inputs))

    def named_targets(self, targets: Targets) -> dict[str, Array]:
        """Targets under the names that the losses read.

        Args:
            targets: One array for a single loss; else by name of the output the loss is put on, or
                by the name that a loss object was given.

        Returns:
            Name to array.

        Raises:
            InputError: One array was given for several losses.
            UnknownNameError: No loss is on an output of that name.
        """
        towers = [tower for loss in self.losses for tower in loss.towers]
        targeted = {tower.inputs[0]: tower.targets for tower in towers if tower.targets}
        by_output = {self.outputs.get(value, value): name for value, name in targeted.items()}
        if targets is None:
            return {}
        if not isinstance(targets, Mapping):
            if len(towers) > 1:
                raise InputError(f"give the targets by output: {', '.join(by_output)}.")
            return {name: as_array(targets) for name in by_output.values()}
        names = {name: name for name in targeted.values()} | targeted | by_output
        for name in targets:
            if name not in names:
                raise UnknownNameError(
                    f"targets are given for '{name}', but no loss is on an output of that name; "
                    f"the losses are on: {', '.join(by_output)}."
                )
        return {names[name]: as_array(array) for name, array in targets.items()}

    def value(self, values: Values, *, examples: int | None = None) -> float:
        """Return the reduced loss on the targets of a batch.

        Args:
            values: Loss inputs and targets by name.
            examples: Number of examples n to divide by; None for that of the batch.

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
        """Return the gradient of ``value`` with respect to each loss input, times a number.

        Args:
            values: Loss inputs and targets by name.
            times: The number.
            examples: As for ``value``.

        Returns:
            Loss input to gradient, in the input's shape.
        """
        total: dict[str, Array] = {}
        for loss in self.losses:
            for tower in loss.towers:
                share = self._gradient_weight(tower, values, examples)
                weight = times * loss.coefficient * share
                for name, gradient in tower.gradient(values).items():
                    part = weight * gradient
                    total[name] = total[name] + part if name in total else part
        return total

    def weights(self, values: Values, *, examples: int | None = None) -> tuple[float, ...]:
        """Return the weight of each tower of each loss in ``value``, and in its Fisher matrix.

        Args:
            values: Loss inputs by name.
            examples: As for ``value``.

        Returns:
            The coefficient of the loss times the divisor of the reduction, for each tower.
        """
        return tuple(
            loss.coefficient * self._gradient_weight(tower, values, examples)
            for loss in self.losses
            for tower in loss.towers
        )

    def fisher_scales(self, values: Values, *, examples: int | None = None) -> dict[str, float]:
        """Return the factor of the cotangents of each loss input: the root of its Fisher weight.

        Args:
            values: Loss inputs by name.
            examples: As for ``value``.

        Returns:
            Loss input to factor.
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
            The ratio; None where it differs between losses.
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

    def _gradient_weight(
        self, loss: LossFunction, values: Values, examples: int | None = None
    ) -> float:
        batch, predictions = self.examples(values), _predictions(loss, values)
        n = batch if examples is None else examples
        # predictions = batch · t. Integers are divided once, so that n = batch gives 1 / (n·t).
        weights = {"mean": batch / (predictions * n), "batch_mean": 1 / n, "sum": 1.0}
        return weights[self.reduction]

    def _fisher_weight(
        self, loss: LossFunction, values: Values, examples: int | None = None
    ) -> float:
        batch, predictions = self.examples(values), _predictions(loss, values)
        n = batch if examples is None else examples
        weights = {"mean": batch / predictions, "batch_mean": 1.0, "sum": float(n)}
        return weights[self.reduction]


def check_reduction(reduction: str) -> None:
    """Refuse an unknown reduction.

    Raises:
        InputError: It is unknown.
    """
    if reduction not in REDUCTIONS:
        raise InputError(
            f"unknown reduction '{reduction}'; choose one of: {', '.join(REDUCTIONS)}."
        )


def _predictions(loss: LossFunction, values: Values) -> int:
    """Examples times positions: the order of these two axes does not matter."""
    return len(values[loss.inputs[0]]) * loss.positions(values)
