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

For a part of a larger batch, n and the n·t predictions are those of the larger batch. The caller
passes them as ``counts``. The loss of the larger batch is then the sum of the losses of its parts,
and its gradient is the sum of their gradients. Parts may have different numbers of positions; n·t
is then the sum of their predictions.
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
class Counts:
    """The numbers by which reductions divide. Those of several parts of a batch can be added.

    Attributes:
        examples: Number of examples.
        predictions: Number of predictions of each tower of each loss.
    """

    examples: float
    predictions: tuple[float, ...]

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(self.predictions, other.predictions, strict=True)
        return Counts(self.examples + other.examples, tuple(one + two for one, two in pairs))

    def of(self, examples: int) -> "Counts":
        """Return the counts of a number of examples that have as many predictions each."""
        return Counts(examples, tuple(n * examples / self.examples for n in self.predictions))


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
        return tuple(dict.fromkeys(name for tower in self._towers for name in tower.inputs))

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
        towers = self._towers
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

    def value(self, values: Values, *, counts: Counts | None = None) -> float:
        """Return the reduced loss on the targets of a batch.

        Args:
            values: Loss inputs and targets by name.
            counts: Counts of the batch of which ``values`` are a part; None if they are the batch.

        Returns:
            The sum over the losses, each times its coefficient, in nats.
        """
        weights = self.weights(values, counts=counts)
        pairs = zip(weights, self._towers, strict=True)
        total: float = sum(weight * tower.value(values) for weight, tower in pairs)
        return total

    def cotangents(
        self, values: Values, times: float = 1.0, *, counts: Counts | None = None
    ) -> dict[str, Array]:
        """Return ``times`` times the gradient of ``value``; see ``value_and_cotangents``."""
        return self.value_and_cotangents(values, times, counts=counts)[1]

    def value_and_cotangents(
        self, values: Values, times: float = 1.0, *, counts: Counts | None = None
    ) -> tuple[float, dict[str, Array]]:
        """Return ``value``, and ``times`` times its gradient with respect to each loss input.

        Args:
            values: Loss inputs and targets by name.
            times: Factor of the gradient.
            counts: As for ``value``.

        Returns:
            The value in nats, and a map from a loss input to a gradient of its shape.
        """
        total, cotangents = 0.0, dict[str, Array]()
        weights = self.weights(values, counts=counts)
        for weight, tower in zip(weights, self._towers, strict=True):
            value, gradients = tower.value_and_gradient(values)
            total += weight * value
            for name, gradient in gradients.items():
                part = times * weight * gradient
                cotangents[name] = cotangents[name] + part if name in cotangents else part
        return total, cotangents

    def weights(self, values: Values, *, counts: Counts | None = None) -> tuple[float, ...]:
        """Return the weight of each tower of each loss in ``value`` and in its Fisher matrix.

        Args:
            values: Loss inputs by name.
            counts: As for ``value``.

        Returns:
            For each tower, the coefficient of its loss times the weight of the reduction.
        """
        coefficients = (loss.coefficient for loss in self.losses for _ in loss.towers)
        reduced = self._gradient_weights(counts or self.counts(values))
        return tuple(k * weight for k, weight in zip(coefficients, reduced, strict=True))

    def fisher_scales(self, values: Values, *, counts: Counts | None = None) -> dict[str, float]:
        """Return the scale of the cotangents of each loss input for the Fisher matrix.

        The scale is the square root of the weight of the reduction in the Fisher matrix.

        Args:
            values: Loss inputs by name.
            counts: As for ``value``.

        Returns:
            Map from a loss input to its scale.
        """
        weights = self._fisher_weights(counts or self.counts(values))
        pairs = zip(weights, self._towers, strict=True)
        return {name: sqrt(weight) for weight, tower in pairs for name in tower.inputs}

    def fisher_ratio(self, values: Values, *, counts: Counts | None = None) -> float | None:
        """Return the ratio of the source of mode ``empirical`` to the gradient of ``value``.

        Args:
            values: Loss inputs by name.
            counts: As for ``value``.

        Returns:
            The ratio; None if it differs between losses.
        """
        counts = counts or self.counts(values)
        weights = self._fisher_weights(counts), self._gradient_weights(counts)
        ratios = {sqrt(fisher) / gradient for fisher, gradient in zip(*weights, strict=True)}
        return ratios.pop() if len(ratios) == 1 else None

    def counts(self, values: Values) -> Counts:
        """Return the numbers by which the reductions of a batch divide."""
        predictions = tuple(_predictions(tower, values) for tower in self._towers)
        return Counts(self.examples(values), predictions)

    def examples(self, values: Values) -> int:
        """Return the number of examples in a batch."""
        return len(values[self.batch or self.inputs[0]])

    def positions(self, values: Values) -> int:
        """Return the number of predictions of all losses for each example of a batch."""
        return sum(_predictions(tower, values) for tower in self._towers) // self.examples(values)

    def corrections(self, used: Counts, right: Counts) -> tuple[float, ...]:
        """Return the factors that replace counts by others in the weights of a gradient.

        Args:
            used: Counts with which gradients were computed.
            right: Counts of the batch.

        Returns:
            A factor for each tower of each loss.
        """
        pairs = zip(self._gradient_weights(used), self._gradient_weights(right), strict=True)
        return tuple(new / old for old, new in pairs)

    @property
    def _towers(self) -> tuple[LossFunction, ...]:
        return tuple(tower for loss in self.losses for tower in loss.towers)

    def _gradient_weights(self, counts: Counts) -> tuple[float, ...]:
        """Return the weight of the reduction in the gradient of each tower."""
        if self.reduction == "mean":
            return tuple(1 / n for n in counts.predictions)
        weight = 1 / counts.examples if self.reduction == "batch_mean" else 1.0
        return (weight,) * len(counts.predictions)

    def _fisher_weights(self, counts: Counts) -> tuple[float, ...]:
        """Return the weight of the reduction in the Fisher matrix of each tower."""
        if self.reduction == "mean":
            return tuple(counts.examples / n for n in counts.predictions)
        weight = float(counts.examples) if self.reduction == "sum" else 1.0
        return (weight,) * len(counts.predictions)


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
