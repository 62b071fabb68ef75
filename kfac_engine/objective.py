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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal, TypeAlias

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.graph.structure import Graph
from kfac_engine.losses import LOSSES
from kfac_engine.losses.base import LossFunction, RegisteredLoss

Reduction: TypeAlias = Literal["mean", "batch_mean", "sum"]
LossChoice: TypeAlias = str | LossFunction
Targets: TypeAlias = Array | Mapping[str, Array] | None
REDUCTIONS: tuple[Reduction, ...] = ("mean", "batch_mean", "sum")


@dataclass(frozen=True, slots=True)
class Objective:
    """Losses with their reduction.

    Attributes:
        losses: One or more; their values are added.
        reduction: A row of the table above.
    """

    losses: tuple[RegisteredLoss, ...]
    reduction: Reduction

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
        """
        towers = [tower for loss in self.losses for tower in loss.towers]
        names = {tower.inputs[0]: tower.targets for tower in towers if tower.targets}
        if targets is None:
            return {}
        if isinstance(targets, Mapping):
            return {names.get(name, name): array for name, array in targets.items()}
        if len(towers) > 1:
            raise InputError(f"give the targets by output: {', '.join(names)}.")
        return {name: as_array(targets) for name in names.values()}

    def value(self, values: Values) -> float:
        """The reduced loss on the targets of the batch."""
        parts = [
            loss.coefficient * self._gradient_weight(tower, values) * tower.value(values)
            for loss in self.losses
            for tower in loss.towers
        ]
        total: float = sum(parts)
        return total

    def cotangents(self, values: Values) -> dict[str, Array]:
        """Gradient of ``value`` with respect to each loss input."""
        total: dict[str, Array] = {}
        for loss in self.losses:
            for tower in loss.towers:
                weight = loss.coefficient * self._gradient_weight(tower, values)
                for name, gradient in tower.gradient(values).items():
                    part = weight * gradient
                    total[name] = total[name] + part if name in total else part
        return total

    def fisher_scales(self, values: Values) -> dict[str, float]:
        """Square roots of the Fisher weights, by loss input: what cotangents are multiplied by."""
        return {
            name: sqrt(self._fisher_weight(tower, values))
            for loss in self.losses
            for tower in loss.towers
            for name in tower.inputs
        }

    def _gradient_weight(self, loss: LossFunction, values: Values) -> float:
        n = len(values[loss.inputs[0]])
        weights = {"mean": 1 / (n * loss.positions(values)), "batch_mean": 1 / n, "sum": 1.0}
        return weights[self.reduction]

    def _fisher_weight(self, loss: LossFunction, values: Values) -> float:
        n = len(values[loss.inputs[0]])
        weights = {"mean": 1 / loss.positions(values), "batch_mean": 1.0, "sum": float(n)}
        return weights[self.reduction]


def choose_losses(
    graph: Graph,
    loss: LossChoice | Sequence[LossChoice],
    output: str | Sequence[str] | None,
    class_axis: int,
) -> tuple[LossFunction, ...]:
    """Loss objects on the outputs of a model.

    Args:
        graph: The model.
        loss: A name of ``LOSSES`` or a loss object, or a list of them, one an output.
        output: The output each loss is put on; may be left out where there is one.
        class_axis: Axis of the classes, for losses given by name.

    Returns:
        The losses. The targets of a single one are named ``"targets"``.

    Raises:
        UnknownNameError: A loss or an output goes by no such name.
        InputError: The outputs do not tell which loss is meant for which.
    """
    choices = [loss] if isinstance(loss, str | LossFunction) else list(loss)
    named = [choice for choice in choices if isinstance(choice, str)]
    outputs = _outputs(graph, len(named), output)
    single = len(choices) == 1
    losses = []
    for choice in choices:
        if isinstance(choice, str):
            value = outputs.pop(0)
            targets = "targets" if single else f"targets of {value}"
            losses.append(LOSSES[choice](value, targets=targets, class_axis=class_axis))
        else:
            losses.append(choice)
    known = set(graph.values())
    for missing in (n for found in losses for n in found.inputs if n not in known):
        raise UnknownNameError(
            f"the loss reads '{missing}', which is no value of model '{graph.name}'; its outputs "
            f"are: {', '.join(graph.outputs)}."
        )
    return tuple(losses)


def check_reduction(reduction: str) -> None:
    """Refuse an unknown reduction.

    Raises:
        InputError: It is unknown.
    """
    if reduction not in REDUCTIONS:
        raise InputError(
            f"unknown reduction '{reduction}'; choose one of: {', '.join(REDUCTIONS)}."
        )


def _outputs(graph: Graph, count: int, output: str | Sequence[str] | None) -> list[str]:
    if output is None and count == len(graph.outputs):
        return list(graph.outputs)
    chosen = [output] if isinstance(output, str) else list(output or ())
    if len(chosen) != count:
        raise InputError(
            f"the model has the outputs {', '.join(graph.outputs)}; name the {count} that the "
            f"loss is put on with output=…."
        )
    return chosen
