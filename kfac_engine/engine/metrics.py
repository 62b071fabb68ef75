"""Metrics of predictions: a registry of names, and functions of the caller.

A metric is measured batch by batch as a sum over examples. The sums of all batches are divided
once, so that the result does not depend on the sizes of the batches.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from typing import Any, Literal, TypeAlias

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.arguments import listed
from kfac_engine.backend.namespace import as_array
from kfac_engine.errors import InputError, NonFiniteError, ShapeError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.objective import Objective, Targets
from kfac_engine.registry import Registry

# Takes the outputs of the model, as ``Engine.predict`` returns them, and the targets of a batch.
# Returns an array with the examples on the first axis.
MetricFunction: TypeAlias = Callable[[Any, Any], Any]
# What a caller names: an entry of ``METRICS``, ``"topK"``, or a function.
MetricChoice: TypeAlias = str | MetricFunction


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A batch with its predictions.

    Attributes:
        objective: The losses.
        values: The values that the losses read, with the targets.
        outputs: The outputs of the model, as ``Engine.predict`` returns them; None if no metric
            reads them.
        targets: The targets, as the caller passed them.
    """

    objective: Objective
    values: Values
    outputs: Any
    targets: Targets

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.objective.examples(self.values)

    def towers(self) -> list[tuple[LossFunction, Array]]:
        """Return each loss with its checked targets."""
        towers = (tower for loss in self.objective.losses for tower in loss.towers)
        return [(tower, tower.check_targets(self.values)) for tower in towers]


Direction: TypeAlias = Literal["higher", "lower"]
# A sum over the examples of a batch, and the number of examples that it is divided by: 0 where the
# metric of several batches is the sum of theirs.
Sum: TypeAlias = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        measure: Returns the sum over a batch.
        finish: Converts the mean over all batches to the metric.
        reads_outputs: Whether the metric reads the outputs of the model.
        better: Which values are better, ``"higher"`` or ``"lower"``; None where only the caller
            knows.
    """

    measure: Callable[[Evaluated], Sum]
    finish: Callable[[float], float] = float
    reads_outputs: bool = False
    better: Direction | None = "lower"


def _loss(batch: Evaluated) -> Sum:
    """The loss times the number of examples; the loss itself under the reduction ``"sum"``."""
    loss = batch.objective.value(batch.values)
    if not isfinite(loss):
        raise NonFiniteError(f"the loss of a batch is {loss:g}; check the data and parameters.")
    return (
        (loss, 0) if batch.objective.reduction == "sum" else (loss * batch.examples, batch.examples)
    )


def _mean(arrays: Sequence[Array], batch: Evaluated) -> Sum:
    """The mean over all entries, times the number of examples."""
    total = sum(float(array.sum(dtype=np.float64)) for array in arrays)
    return total / sum(array.size for array in arrays) * batch.examples, batch.examples


def _accuracy(batch: Evaluated) -> Sum:
    return _mean([tower.hits(batch.values, targets) for tower, targets in batch.towers()], batch)


def _top(count: int, batch: Evaluated) -> Sum:
    ranks = [tower.ranks(batch.values, targets) for tower, targets in batch.towers()]
    return _mean([rank < count for rank in ranks], batch)


def _absolute(batch: Evaluated) -> Sum:
    return _mean([abs(t.errors(batch.values, targets)) for t, targets in batch.towers()], batch)


def _squared(batch: Evaluated) -> Sum:
    errors = [tower.errors(batch.values, targets) for tower, targets in batch.towers()]
    return _mean([np.square(error.astype(np.float64)) for error in errors], batch)


METRICS: Registry[Metric] = Registry(
    "metric",
    {
        "loss": Metric(_loss),
        "accuracy": Metric(_accuracy, better="higher"),
        "top5": Metric(partial(_top, 5), better="higher"),
        "mean_absolute_error": Metric(_absolute),
        "mean_squared_error": Metric(_squared),
        "root_mean_squared_error": Metric(_squared, sqrt),
    },
)


def metrics_of(choices: Sequence[MetricChoice]) -> dict[str, Metric]:
    """Return metrics by name.

    Args:
        choices: Names of ``METRICS``; ``"topK"`` with a number K, such as ``"top3"``; functions,
            which have the names of their definitions.

    Returns:
        Name to metric.

    Raises:
        InputError: An entry is neither a name nor a function with a name, or a name is repeated.
        UnknownNameError: No metric has such a name.
    """
    metrics: dict[str, Metric] = {}
    for choice in listed("metrics", choices, "['loss', 'accuracy']"):
        name, metric = _named(choice)
        if name in metrics:
            raise InputError(f"the metric '{name}' is named twice; name each once.")
        metrics[name] = metric
    return metrics


def _named(choice: object) -> tuple[str, Metric]:
    if isinstance(choice, str):
        family = re.fullmatch(r"top([1-9]\d{0,8})", choice)
        if family:
            return choice, Metric(partial(_top, int(family[1])), better="higher")
        return choice, METRICS[choice]
    name = getattr(choice, "__name__", "")
    if not callable(choice) or not name.isidentifier():
        raise InputError(
            f"a metric must be one of {', '.join(METRICS)}, or a function with a name, made by "
            f"def, got {choice!r:.80}."
        )
    if name in METRICS:
        raise InputError(f"the metric '{name}' exists already; give the function another name.")
    return name, Metric(partial(_apply, choice, name), reads_outputs=True, better=None)


def _apply(function: MetricFunction, name: str, batch: Evaluated) -> Sum:
    """Return the sum of a function of the caller over a batch."""
    results = as_array(function(batch.outputs, batch.targets))
    if results.shape[:1] != (batch.examples,):
        raise ShapeError(
            f"the metric '{name}' returns an array of shape {results.shape} for a batch of "
            f"{batch.examples} examples; it must return a value for each example, without a mean."
        )
    return _mean([results], batch)
