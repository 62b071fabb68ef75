"""Computes metrics of predictions, by registered names or by the caller's functions.

A metric is measured batch by batch as sums over predictions. The sums of all batches are divided
once, so that the result depends neither on the sizes of the batches, nor on which of them have
targets that do not count.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import Parameter, signature
from math import isfinite, sqrt
from typing import Any, Literal, TypeAlias

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.arguments import check_list
from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.curvature.factors.row_weights import ExamplePlaces, ExampleWeights
from kfac_engine.errors import InputError, NonFiniteError, ShapeError, UnsupportedError
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.objective import Objective, Observation
from kfac_engine.losses.observed import Targets, Weighted, times
from kfac_engine.registry import Registry

# Takes the outputs of the model, as ``Engine.predict`` returns them, the targets of a batch, and
# their weights if it has three arguments. Returns an array with the examples on the first axis.
MetricFunction: TypeAlias = Callable[..., Any]
# What a caller names: an entry of ``METRICS``, ``"topK"``, or a function.
MetricChoice: TypeAlias = str | MetricFunction


Direction: TypeAlias = Literal["higher", "lower"]
# A sum over the predictions of a batch, and the number that divides it, such as the sum of their
# weights; 0 where the metric of several batches is the sum of theirs.
Sum: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Evaluated:
    """A batch with its predictions."""

    objective: Objective  # the losses
    values: Values  # the values that the losses read, with the targets
    # The outputs of the model, as ``Engine.predict`` returns them; None if no metric reads them.
    outputs: Any
    targets: Targets  # the targets, as the caller passed them
    added: Collection[str] = ()  # loss inputs in which the file has summed the losses of the batch

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.objective.examples(self.values)

    @cached_property
    def observation(self) -> Observation:
        """The targets, and how much each counts."""
        return self.objective.observe(self.values)

    @property
    def is_weighted(self) -> bool:
        """Whether targets are ignored or have weights."""
        return any(seen.counts is not None for seen in self.observation.terms)

    def weights(self) -> Array | Mapping[str, Array]:
        """Return the weights of predictions, or of targets where targets of one prediction differ.

        The weights of several losses are by output.
        """
        arrays = dict[str, Array]()
        for term, seen in zip(self.objective.terms, self.observation.terms, strict=True):
            like, value = self.values[term.inputs[0]], term.inputs[0]
            xp, axis = array_module(like), term.class_axis % like.ndim
            counts = xp.ones((1,) * like.ndim) if seen.counts is None else seen.counts
            entries = like.ndim == 1 or counts.shape[axis] > 1
            shape = tuple(n for k, n in enumerate(like.shape) if entries or k != axis)
            counts = counts if entries else xp.squeeze(counts, axis)
            output = self.objective.outputs.get(value, value)
            arrays[output] = xp.broadcast_to(counts, shape).astype(np.float64)
        return arrays if len(arrays) > 1 else next(iter(arrays.values()))

    def weights_like(self, results: Array) -> Array | None:
        """Return the weights of a metric's values; None if the values have no weights.

        There is a value for each example, or for each entry of ``weights``.
        """
        if results.ndim == 1:
            terms = zip(self.objective.terms, self.observation.terms, strict=True)
            pairs = [(term, seen.counts) for term, seen in terms]
            places = ExamplePlaces(self.objective.axes)
            weights = ExampleWeights.of(pairs, self.values, self.examples, places)
            return None if weights is None else weights.weights
        counts = self.weights()
        fits = not isinstance(counts, Mapping) and counts.shape == results.shape
        return counts if fits else None  # type: ignore[return-value] # an array

    def measured(self, measure: Callable[[LossFunction, Values, Array], Array]) -> Sum:
        """Return the sum of a measure over all predictions that count, and their number.

        ``measure`` returns a number for each prediction or target. The results are sums over the
        losses, with the weights of the predictions.
        """
        total = number = 0.0
        for term, seen in zip(self.objective.terms, self.observation.terms, strict=True):
            assert seen.labels is not None, "observe requires targets"
            results = measure(term, self.values, seen.labels)
            counts = seen.counts
            if counts is None:
                number += results.size
            else:
                xp, axis = array_module(results), term.class_axis % counts.ndim
                counts = term.of_predictions(self.values, counts)
                counts = xp.squeeze(counts, axis) if results.ndim < counts.ndim else counts
                counts = xp.broadcast_to(counts, results.shape)
                number += float(counts.sum(dtype=np.float64))
                results = times(results.astype(np.float64), counts)
            total += float(results.sum(dtype=np.float64))
        return total, number


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric."""

    # Returns sums over a batch, one or one for each loss function. The ratios of the sums of all
    # batches are added.
    measure: Callable[[Evaluated], Sequence[Sum]]
    finish: Callable[[float], float] = float  # converts the result to the metric
    reads_outputs: bool = False  # whether the metric reads the outputs of the model
    # Which values are better, ``"higher"`` or ``"lower"``; None where only the caller knows.
    better: Direction | None = "lower"


def _loss(batch: Evaluated) -> list[Sum]:
    """Return the sum of each loss function, and the divisor of its mean."""
    sums = batch.objective.sums(batch.values, batch.observation, batch.added)
    for total, divisor in sums:
        if not isfinite(total):
            loss = total / (divisor or 1)
            raise NonFiniteError(f"the loss of a batch is {loss:g}; check the data and parameters.")
    return sums


def _accuracy(batch: Evaluated) -> list[Sum]:
    return [batch.measured(lambda loss, values, targets: loss.hits(values, targets))]


def _top(count: int, batch: Evaluated) -> list[Sum]:
    return [batch.measured(lambda loss, values, targets: loss.ranks(values, targets) < count)]


def _label_errors(batch: Evaluated) -> list[Sum]:
    """Return the edit distances of all predictions, and the number of labels of their targets."""
    distances, _ = batch.measured(
        lambda loss, values, targets: loss.label_errors(values, targets)[0]
    )
    labels, _ = batch.measured(lambda loss, values, targets: loss.label_errors(values, targets)[1])
    return [(distances, labels)]


def _absolute(batch: Evaluated) -> list[Sum]:
    return [batch.measured(lambda loss, values, targets: abs(loss.errors(values, targets)))]


def _squared(batch: Evaluated) -> list[Sum]:
    return [
        batch.measured(
            lambda loss, values, targets: np.square(loss.errors(values, targets).astype(np.float64))
        )
    ]


METRICS: Registry[Metric] = Registry(
    "metric",
    {
        "loss": Metric(_loss),
        "accuracy": Metric(_accuracy, better="higher"),
        "top5": Metric(partial(_top, 5), better="higher"),
        "label_error_rate": Metric(_label_errors),
        "mean_absolute_error": Metric(_absolute),
        "mean_squared_error": Metric(_squared),
        "root_mean_squared_error": Metric(_squared, sqrt),
    },
)


def default_metrics(objective: Objective) -> tuple[str, ...]:
    """Return the names of the metrics that ``evaluate`` measures where none are given."""
    if all(term.sequences for term in objective.terms):
        return ("loss", "label_error_rate")
    return ("loss", "accuracy") if all(t.discrete for t in objective.terms) else ("loss",)


def metrics_of(choices: Sequence[MetricChoice]) -> dict[str, Metric]:
    """Return metrics by name.

    A choice is a name of ``METRICS``, ``"topK"`` with a number K, such as ``"top3"``, or a function
    that has a name. A repeated name raises InputError.
    """
    metrics: dict[str, Metric] = {}
    for choice in check_list("metrics", choices, "['loss', 'accuracy']"):
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


def _apply(function: MetricFunction, name: str, batch: Evaluated) -> list[Sum]:
    """Return the sum over a batch of the values that a caller's function returns."""
    targets = batch.targets.targets if isinstance(batch.targets, Weighted) else batch.targets
    weights = (batch.weights(),) if _reads_weights(function) else ()
    results = as_array(function(batch.outputs, targets, *weights))
    if results.shape[:1] != (batch.examples,):
        raise ShapeError(
            f"the metric '{name}' returns an array of shape {results.shape} for a batch of "
            f"{batch.examples} examples; it must return a value for each example, without a mean."
        )
    if not batch.is_weighted:
        return [(float(results.sum(dtype=np.float64)), results.size)]
    counts = batch.weights_like(results)
    if counts is None:
        raise UnsupportedError(
            f"the metric '{name}' returns an array of shape {results.shape}, whose values have no "
            f"weights; return a value for each example, or for each weight."
        )
    total = times(results.astype(np.float64), counts).sum(dtype=np.float64)
    return [(float(total), float(counts.sum(dtype=np.float64)))]


def _reads_weights(function: MetricFunction) -> bool:
    """Return whether a function has a third argument, for the weights."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # a function without Python code
        return False
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in kinds and p.default is Parameter.empty]) == 3
